"""The step profile: record some steps on all ranks, and break down their time.

``hk.init()`` starts a recorder if the user sets ``HVDKIT_PROFILE``. After the last recorded step, the chief collects
the profiles of all ranks and reports them: a table, a summary, and a trace. The modules, in reading order:

    settings.py        the steps to record, and the output folder
    recorder.py        records the steps of this rank
    rank_profile.py    what a rank records
    xplane.py          reads the output of TensorFlow's profiler
    timeline.py        reads Horovod's own timeline
    collect.py         measures the clock offsets between ranks, and sends all profiles to the chief
    profile_report.py  the report, on the chief only: the table and the output files
    step_parts.py      pure: breaks a step down into compute, exchange, wait, ...
    intervals.py       pure: sets of time intervals
    trace.py           the trace for Perfetto
"""
