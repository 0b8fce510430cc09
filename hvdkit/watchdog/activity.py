"""Detects from outside whether a process makes progress."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.machine import processes
from hvdkit.watchdog.flight_recorder import RecorderState

# Threads that together use less than this fraction of a core are only polling, and count as idle.
_WORKING = 0.02
# Bytes per second. Child processes that transfer less count as idle.
_TRANSFERRING = 4096


class Activity:
    """Measures how long a rank has made no progress.

    A rank makes progress if its training thread uses CPU time outside of collectives. While a graph runs, that thread
    sleeps, possibly for hours, while other threads compute or wait for a disk. If these sleep as well, either the graph
    is waiting for other ranks or the training thread for a child process.

    Args:
        pid: the rank's process.
        waiters: IDs of its busy-polling threads (Horovod and MPI).
        now: host's monotonic clock, in seconds.
    """

    def __init__(self, pid: int, waiters: Sequence[int], now: float) -> None:
        self._pid, self._waiters = pid, set(waiters)
        self._moved = self._ran = self._looked = now
        self._time: int | None = None
        self._times: dict[int, int] = {}
        self._children: dict[int, processes.Work] = {}

    def moved(self, now: float) -> None:
        """Record progress that is not visible from outside."""
        self._moved = now

    def idle(self, state: RecorderState, now: float) -> float:
        """Return the seconds since the last progress."""
        spent, seconds = processes.cpu_nanoseconds(self._pid, state.thread), now - self._looked
        works = [self._others_work(seconds), self._children_work(seconds)]
        if spent != self._time or spent is None or any(works):
            self._time, self._ran = spent, now
        self._looked = now
        return now - max(state.since, self._moved, 0.0 if state.waiting else self._ran)

    def _children_work(self, seconds: float) -> bool:
        """Return True if the rank's descendants computed or transferred data, or are waiting for a disk."""
        found = {pid: done for pid in processes.descendants(self._pid) if (done := processes.work(pid)) is not None}
        begun = processes.Work(0.0, 0)  # count a new process's work from its start
        before, self._children = self._children, found
        computed = sum(done.seconds - before.get(pid, begun).seconds for pid, done in found.items())
        transferred = sum(done.transferred - before.get(pid, begun).transferred for pid, done in found.items())
        is_working = computed > _WORKING * seconds or transferred > _TRANSFERRING * seconds
        return is_working or any(_waits_for_disk(pid) for pid in found)

    def _others_work(self, seconds: float) -> bool:
        """Return True if the rank's non-polling threads computed, or are waiting for a disk."""
        found = processes.threads(self._pid) - self._waiters
        times = {thread: processes.cpu_nanoseconds(self._pid, thread) or 0 for thread in found}
        worked = sum(spent - self._times.get(thread, 0) for thread, spent in times.items())
        self._times = times
        return worked > _WORKING * seconds * 1e9 or any(_waits_for_disk(self._pid, thread) for thread in found)


def _waits_for_disk(pid: int, thread: int | None = None) -> bool:
    found = processes.stat(pid, thread)
    return found is not None and found.state == "D"
