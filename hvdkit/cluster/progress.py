"""How far this rank is: its step, its last collective, and whether the thread that trains still runs.

Written by the thread that trains, at the cost of some attributes; read by the watchdog's thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvdkit.cluster.checks import EAGER, source_line
from hvdkit.machine.processes import Work, descendants, threads, waits_for_disk, work

if TYPE_CHECKING:
    from hvdkit.profiling.recorder import Recorder

# TensorFlow's function that runs a graph, or an eager op: where a rank sleeps that waits in a graph's collective.
_IN_GRAPH = {"quick_execute", "execute_with_cancellation"}
# Threads that together take less of a core do not work: they look now and then whether there is something to do.
_WORKING = 0.02
# Nor does a child process that transfers less than so many bytes a second.
_TRANSFERRING = 4096


class Progress:
    """What a rank has done last.

    Attributes:
        step: steps trained, or None where nobody counts them.
        count: eager collectives and exchanges begun.
        name: the last one, or "".
        key: by which ranks match the last one: those that take part, and its number among theirs.
        since: when it began, or ended, by ``time.monotonic``.
        waiting: it has begun and not ended.
        tell: called with "waits" and "came", and what about: at each of them with ``HVDKIT_CHECK=1``, otherwise by the
            watchdog once the rank has waited for a while; None without a watchdog.
        tells_all: ``HVDKIT_CHECK=1``.
        profile: records some steps; None but for ``HVDKIT_PROFILE``.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.count = 0
        self.name = ""
        self.key = ""
        self.since = time.monotonic()
        self.waiting = False
        self.tell: Callable[..., None] | None = None
        self.tells_all = False
        self.profile: Recorder | None = None
        self._thread, self._ident = threading.get_native_id(), threading.get_ident()
        self._ran = self._looked = time.monotonic()
        self._time: int | None = None
        self._times: dict[int, int] = {}
        self._waiters: set[int] = set()
        self._children: dict[int, Work] = {}
        self._reasons: list[str] = []
        self._counts: dict[tuple[int, ...] | None, int] = {}
        self._ranks: tuple[int, ...] | None = None
        self._told = ""  # the key of the wait that rank 0 knows of

    def begin(self, name: str, ranks: Sequence[int] | None = None) -> None:
        """Note that this thread begins a collective among some ranks; None for all."""
        self.count += 1
        self.name = name
        self._ranks = None if ranks is None else tuple(ranks)
        number = self._counts[self._ranks] = self._counts.get(self._ranks, 0) + 1
        self.key = f"{EAGER}{number}" if self._ranks is None else f"{EAGER}{number} of {list(self._ranks)}"
        self.since = time.monotonic()
        self._thread, self._ident = threading.get_native_id(), threading.get_ident()
        self.waiting = True
        if self.profile is not None:
            self.profile.began(name)
        if self.tells_all:
            self.tell_wait()

    def end(self) -> None:
        """Note that the collective is done."""
        self.since = time.monotonic()
        self.waiting = False
        if self.profile is not None:
            self.profile.ended()
        if self._told and self.tell is not None:
            self.tell("came", key=self._told)
        self._told = ""

    def tell_wait(self) -> None:
        """Tell rank 0 in which collective this rank waits, once."""
        key, name, tell = self.key, self.name, self.tell
        frame = sys._current_frames().get(self._ident)
        if tell is None or frame is None or not self.waiting or self._told == key:
            return
        line = source_line((one.filename, one.lineno or 0) for one in traceback.extract_stack(frame))
        self._told = key
        tell("waits", key=key, what=name, line=line, ranks=self._ranks)
        if not self.waiting or self.key != key:  # it was over before rank 0 was told
            tell("came", key=key)

    def waits_in(self) -> str | None:
        """Return the key of the collective in which this rank waits, or None."""
        return self.key if self.waiting else None

    def at_step(self, step: int) -> None:
        """Note the number of steps trained."""
        self.step = step
        self._thread, self._ident = threading.get_native_id(), threading.get_ident()
        if self.profile is not None:
            self.profile.at_step(step)

    def begin_busy(self, reason: str) -> None:
        """Note work of which nothing is seen here: until :meth:`end_busy` this rank does not hang."""
        self._reasons.append(reason)

    def end_busy(self, reason: str) -> None:
        """Note the end of work that :meth:`begin_busy` has noted."""
        self._ran = time.monotonic()
        if self.waiting:  # the rank was busy while it waited in a collective
            self.since = self._ran
        self._reasons.remove(reason)

    def reason(self) -> str | None:
        """Return the reason of the last :meth:`begin_busy` that has not ended, or None."""
        reasons = self._reasons[-1:]
        return reasons[0] if reasons else None

    def idle(self) -> float:
        """Return for how many seconds nothing has moved. Called by the watchdog, every few seconds.

        A rank moves while the thread that trains runs at all, outside of a collective. A graph leaves it asleep, for
        hours if the graph has the loop over all steps: then other threads compute, or wait for a disk. If they
        sleep, too, the graph waits for other ranks, unless the thread waits for a child process that works.
        """
        now = time.monotonic()
        spent, seconds = _cpu_time(self._thread), now - self._looked
        children_work = self._children_work(seconds)
        if spent != self._time or spent is None or self._others_work(seconds) or children_work:
            self._time, self._ran = spent, now
        self._looked = now
        if self._reasons:
            return 0.0
        return now - (self.since if self.waiting else max(self._ran, self.since))

    def _children_work(self, seconds: float) -> bool:
        """Return True if the processes below this one have computed, or transferred data, or wait for a disk."""
        found = {pid: done for pid in descendants(os.getpid()) if (done := work(pid)) is not None}
        begun = Work(0.0, 0)  # what a new process has done counts from its start
        before, self._children = self._children, found
        computed = sum(done.seconds - before.get(pid, begun).seconds for pid, done in found.items())
        transferred = sum(done.transferred - before.get(pid, begun).transferred for pid, done in found.items())
        is_working = computed > _WORKING * seconds or transferred > _TRANSFERRING * seconds
        return is_working or any(map(waits_for_disk, found))

    def _others_work(self, seconds: float) -> bool:
        """Return True if this process's threads have worked; those of Horovod and MPI wait by looking."""
        ours = {t.native_id for t in threading.enumerate() if t.name.startswith("hvdkit-watchdog")}
        times = {t: _cpu_time(t) or 0 for t in threads() - self._waiters - ours}
        worked = sum(spent - self._times.get(thread, 0) for thread, spent in times.items())
        self._times = times
        return worked > _WORKING * seconds * 1e9 or any(map(waits_for_disk, times))

    @contextmanager
    def starting_waiters(self) -> Iterator[None]:
        """Take the threads that begin within the context for such as wait by looking."""
        before = threads()
        yield
        self._waiters |= threads() - before

    def told(self) -> dict[str, Any]:
        """Return what other ranks should know, for JSON."""
        frame = sys._current_frames().get(self._ident)
        waiting = self.waiting or (frame is not None and frame.f_code.co_name in _IN_GRAPH)
        words = f"{'waits in' if self.waiting else 'last collective'} {self.name}" if self.name else ""
        if frame is not None:
            words = f"in {frame.f_code.co_name}, {frame.f_code.co_filename}:{frame.f_lineno}; {words}".strip("; ")
        if (reason := self.reason()) is not None:
            words = f"busy: {reason}; {words}".strip("; ")
        return {"step": self.step, "count": self.count, "waiting": waiting, "words": words}

    def __str__(self) -> str:
        at = "" if self.step is None else f"at step {self.step}, "
        if (reason := self.reason()) is not None:
            at = f"{at}busy: {reason}, "
        if not self.name:
            return f"{at}no eager collective yet"
        ago = f"{time.monotonic() - self.since:.0f} s"
        which = f"{self.name} (number {self.count})"
        return f"{at}has waited in {which} for {ago}" if self.waiting else f"{at}came out of {which} {ago} ago"


def _cpu_time(thread: int) -> int | None:
    """Return the nanoseconds that a thread has run, or None where it cannot be known."""
    try:
        # Python's own clock of a thread may crash where the thread is over.
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])
    except (OSError, IndexError):
        return None


PROGRESS = Progress()
_NOTHING: AbstractContextManager[None] = nullcontext()


def spending(kind: Literal["input", "save"]) -> AbstractContextManager[None]:
    """Note, for a profile, what the training thread spends its time on within the context.

    Example::

        with spending("input"):
            batch = next(source)
    """
    return _NOTHING if PROGRESS.profile is None else PROGRESS.profile.span(kind)


@contextmanager
def collective(name: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Note a collective among ``ranks`` (default: all) that is begun and ended within the context.

    Rank 0 compares ranks by the number of collectives they have begun. So all of ``ranks`` must enter the context, in
    the same order: after arguments and threads are checked, just before the message is sent.

    Example::

        with collective("barrier()"):
            ...
    """
    PROGRESS.begin(name, ranks)
    try:
        yield
    finally:
        PROGRESS.end()
