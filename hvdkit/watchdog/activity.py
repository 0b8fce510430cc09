"""Detects from outside whether a process makes progress."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.machine import processes
from hvdkit.watchdog.flight_recorder import RecorderState

# Threads that together use less than this fraction of a core are only polling, and count as idle.
MIN_CPU_FRACTION = 0.02
# Bytes per second. Child processes that transfer less count as idle.
_MIN_TRANSFER = 4096
# Seconds over which both are averaged: a tracker, for example, measures the machine in a burst every 15 seconds.
_AVERAGED_SECONDS = 10.0


class _Rate:
    """How much is done per second, on average: a burst is no work if little is done before and after it."""

    def __init__(self) -> None:
        self._excess = 0.0  # what was done in addition to the least that counts as work, of late

    def add(self, amount: float, seconds: float, least: float) -> bool:
        """Add what was done in the last ``seconds``; return True if ``least`` or more per second is done."""
        most = least * _AVERAGED_SECONDS
        self._excess = min(max(0.0, self._excess + amount - least * seconds), 1.1 * most)
        return self._excess > most


class Activity:
    """Measures how long a rank has made no progress.

    A rank makes progress if its training thread uses CPU time outside of collectives. While a graph runs, that thread
    sleeps, possibly for hours, while other threads compute or wait for a disk. If these sleep as well, either the graph
    is waiting for other ranks or the training thread for a child process.

    ``waiters`` are the IDs of threads whose CPU time is no progress: those of Horovod and MPI, which poll, and hvdkit's
    helpers. Times are of the host's monotonic clock, in seconds.
    """

    def __init__(self, pid: int, waiters: Sequence[int], now: float) -> None:
        self._pid = pid
        self._polling_threads = set(waiters)
        self._progressed_at = self._worked_at = self._checked_at = now
        self._training_time: int | None = None  # CPU time of the training thread
        self._thread_times: dict[int, int] = {}  # CPU time of the others that do not poll
        self._children: dict[int, processes.Work] = {}
        self._of_threads = _Rate()
        self._of_children = _Rate()
        self._transfers = _Rate()

    def note_progress(self, now: float) -> None:
        """Record progress that is not visible from outside."""
        self._progressed_at = now

    def idle(self, state: RecorderState, now: float, least_cpu: float = MIN_CPU_FRACTION) -> float:
        """Return the seconds since the last progress.

        ``least_cpu``: part of a core that other threads than the training thread have to use to count as working.
        """
        spent = processes.cpu_nanoseconds(self._pid, state.thread)
        seconds = now - self._checked_at
        threads_worked = self._threads_worked(seconds, least_cpu)
        children_worked = self._children_worked(seconds)
        if spent != self._training_time or spent is None or threads_worked or children_worked:
            self._training_time = spent
            self._worked_at = now
        self._checked_at = now
        return now - max(state.since, self._progressed_at, 0.0 if state.waiting else self._worked_at)

    def _children_worked(self, seconds: float) -> bool:
        """Return True if the rank's descendants computed or transferred data, or are waiting for a disk."""
        after = {pid: work for pid in processes.descendants(self._pid) if (work := processes.work(pid)) is not None}
        none = processes.Work(0.0, 0)  # count a new process's work from its start
        before = self._children
        self._children = after
        computed = sum(work.seconds - before.get(pid, none).seconds for pid, work in after.items())
        transferred = sum(work.transferred - before.get(pid, none).transferred for pid, work in after.items())
        computes = self._of_children.add(computed, seconds, MIN_CPU_FRACTION)
        transfers = self._transfers.add(transferred, seconds, _MIN_TRANSFER)
        return computes or transfers or any(_waits_for_disk(pid) for pid in after)

    def _threads_worked(self, seconds: float, least_cpu: float) -> bool:
        """Return True if the rank's non-polling threads computed, or are waiting for a disk."""
        threads = processes.threads(self._pid) - self._polling_threads
        times = {thread: processes.cpu_nanoseconds(self._pid, thread) or 0 for thread in threads}
        spent = sum(time - self._thread_times.get(thread, 0) for thread, time in times.items())
        self._thread_times = times
        computes = self._of_threads.add(spent / 1e9, seconds, least_cpu)
        return computes or any(_waits_for_disk(self._pid, thread) for thread in threads)


def _waits_for_disk(pid: int, thread: int | None = None) -> bool:
    process = processes.stat(pid, thread)
    return process is not None and process.state == "D"
