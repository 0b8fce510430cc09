"""One sentinel process per rank, one coordinator per job, one verdict.

A sentinel is a small process that watches one rank from outside: exit, signals, stops and progress. It reports typed
events to the coordinator, which runs in ``hvdkit run`` or, without it, in the sentinel of rank 0. If a rank fails, the
coordinator ends the job and writes the last line. The modules, in reading order:

    events.py          the messages: reports and orders
    channel.py         one authenticated connection per sentinel; admission.py is the coordinator's end
    verdict.py         pure: from the events to the rank that failed first, the exit code and the last line
    rank_texts.py      pure: texts of several ranks, equal ones once
    waits.py           pure: detects deadlocks and ranks that run different graphs
    coordinator.py     receives the sentinels' reports, decides when the job has failed
    member.py          the coordinator's state for one rank
    silent_ranks.py    ranks that do not answer, or are stopped
    hung_ranks.py      ranks that have been idle for too long
    left_behind.py     reports ranks that wait long, finds ranks that left by a caught exception
    leaving.py         ranks that end before others, and when each may end
    job_end.py         ends a failed job, step by step
    job_metrics.py     the metrics of a job, as Prometheus text
    metrics_server.py  serves them over HTTP
    otel_export.py     exports them by OpenTelemetry's SDK
    activity.py        detects from outside whether a rank makes progress
    rank_process.py    the sentinel's view of its rank's process, and its measurements for metrics
    base.py            base class of all sentinels
    running.py         the sentinel that starts the rank's program, for ``hvdkit run``
    watching.py        the sentinel of a rank started by another launcher
    coordinating.py    the same for rank 0, with the coordinator in it
    sentinel.py        entry point of all three
    flight_recorder.py the last collectives of a rank, and what its training knows, in shared memory
    flight_file.py     the last collectives of all ranks of a failed job, in a file
    reporter.py        the rank's side: starts its sentinel, reports to it, carries out its orders
    sentinel_start.py  how a rank gets its sentinel
    training_thread.py what the training thread does, seen from another thread
    uncaught.py        uncaught exceptions
    suggestions.py     what a misspelled name may have meant
    tracebacks.py      what exceptions say: their causes, and tracebacks without the frames of libraries
    busy.py            ``hk.busy``
    ending.py          ends a rank: its interpreter exits normally, within a deadline

All modules except the last eight use only the standard library: a sentinel imports neither TensorFlow nor ``hvdkit``.
"""
