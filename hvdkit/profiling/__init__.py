"""The step profile: record some steps on all ranks, and break down their time.

``hk.init()`` starts the recorder (:mod:`recorder`) if the user sets ``HVDKIT_PROFILE``. Everything else is pure: it
turns records into a table, a summary sentence and a trace.
"""
