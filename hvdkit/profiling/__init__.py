"""The step profile: what ranks record of some steps, and where the time of those steps went.

Recording (:mod:`recorder`) is begun by ``hk.init()`` where ``HVDKIT_PROFILE`` is set; everything else is pure: records
in, a table, a sentence and one trace out.
"""
