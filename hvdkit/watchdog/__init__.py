"""One sentinel process per rank, one coordinator per job, one verdict.

A sentinel is a small process that watches one rank from outside: its end, signals, stops, progress. It reports typed
events to the coordinator, which runs in ``hvdkit run`` or, without it, in the sentinel of rank 0. If a rank fails, the
coordinator ends the job and writes the last line. The way through the package:

    events.py       what is reported, and what is ordered
    channel.py      one authenticated connection per sentinel
    verdict.py      pure: from the events to the rank that failed first, the exit code and the last line
    waits.py        pure: ranks that wait for each other, or that run different graphs
    hang.py         pure: the rank for which the others wait in a job that hangs
    coordinator.py  receives what sentinels report, decides when the job has failed
    member.py       what the coordinator knows of a rank
    job_end.py      ends a job that has failed, step by step
    activity.py     whether a rank makes progress, seen from outside
    rank_process.py the rank's process, seen from its sentinel
    base.py         what all sentinels do
    running.py      the sentinel that starts the rank's program, for ``hvdkit run``
    watching.py     the sentinel of a rank that another launcher has started
    coordinating.py the same in rank 0: the coordinator runs in it
    sentinel.py     the program of all three
    flight.py       the last collectives of a rank, in shared memory
    flight_file.py  the last collectives of all ranks of a job that has failed, in a file
    reporter.py     the rank's side: starts its sentinel, reports to it, does what it orders
    uncaught.py     errors that nothing handles
    busy.py         ``hk.busy``
    ending.py       the end of a rank: its interpreter exits normally, within a deadline

All modules but the last four use only the standard library: a sentinel loads neither TensorFlow nor ``hvdkit`` itself.
"""
