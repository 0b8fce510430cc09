"""The sentinel's view of its rank's process."""

from __future__ import annotations

import math
import os
import signal
import socket
import statistics
from collections import deque
from collections.abc import Sequence

from hvdkit.machine import processes
from hvdkit.watchdog.activity import MIN_CPU_FRACTION, Activity
from hvdkit.watchdog.channel import Connection
from hvdkit.watchdog.events import Exiting, Leaving, Measured, Saved, Status, Training
from hvdkit.watchdog.flight_recorder import CollectiveRecord, FlightReader, RecorderState

# Seconds in a collective after which it is reported: another rank may wait for this one in another collective.
_WAITED_SECONDS = 3.0
# Seconds for which the rank's last look at its graphs is valid; how many of its last collectives to search, e.g. for
# those that are pending in a graph, and how many of these to report.
_LOOK_SECONDS = 5.0
_RECENT = 256
_MOST_PENDING = 16
# Seconds after which the last collective is reported, for messages about ranks that wait for this one.
_LAST_SECONDS = 15.0
# Part of a core that threads have to use at exit to count as working: one that uploads may use little.
_LEAST_CPU_AT_EXIT = 0.002
# Pages by which the memory of a process that ends has to change to count as progress.
_CHANGED_PAGES = 256
# How many of the last steps that were measured count.
_STEPS = 9


class RankProcess:
    """The sentinel's view of its rank's process, and the socket to it.

    Attributes:
        program: PID of the process that the launcher or the sentinel started.
        pid: PID of the process that called ``hk.init()``: the program or a descendant.
        connection: messages to and from the process, or None.
        training: the rank's message that it called ``hk.init()``, or None.
        busy: the reason of an open ``hk.busy``, or None.
        saved: what its run has saved, or None.
        stopped_at: when it was first seen stopped, or None.
        leaving: the rank's message that its script has ended, or None.
        exiting: what the rank does since then, or None; ``exiting_since`` is when it began.
        raised_at: when the rank reported an exception that its program may have caught; None after its next collective.
        has_ended: True once the process has ended, after which its PID may be reused, or has left the world.
    """

    def __init__(self, pid: int) -> None:
        self.program = self.pid = pid
        self.connection: Connection | None = None
        self.training: Training | None = None
        self.busy: str | None = None
        self.saved: Saved | None = None
        self.stopped_at: float | None = None
        self.leaving: Leaving | None = None
        self.exiting: Exiting | None = None
        self.exiting_since = 0.0
        self._resident = 0  # pages of its memory when that last changed during its exit, and when this was
        self._resident_since = 0.0
        self._ended_at = 0.0  # when its exit last made progress, and for how long it had waited for a core until then
        self._waited = 0.0
        self.raised_at: float | None = None
        self.has_ended = False
        self._reader: FlightReader | None = None
        self._gauge: RankGauge | None = None
        self._status_pipe: int | None = None
        self._activity: Activity | None = None

    def receive_files(self, received: socket.socket) -> None:
        """Receive the descriptors that the rank sends before its first message: see ``reporter.Reporter``."""
        _, files, _, _ = socket.recv_fds(received, 1, 2)
        if len(files) == 2:
            self._reader = FlightReader(files[0])
            self._gauge = RankGauge(self._reader)
            self._status_pipe = files[1]
            os.close(files[0])

    def begin_training(self, training: Training, now: float) -> None:
        """Record that ``hk.init()`` was called, in the program or in one of its descendants.

        Any other PID belongs to a container's namespace, and could be any process on this host.
        """
        self.training = training
        self.leaving = None
        self.exiting = None
        if training.pid in (self.pid, *processes.descendants(os.getpid())):
            self.pid = training.pid
        self._activity = Activity(self.pid, training.waiters, now)

    @property
    def step(self) -> int | None:
        """Steps trained, or None."""
        return None if self._reader is None else self._reader.state().step

    def signal(self, number: int) -> None:
        """Send a signal to the program, unless it has ended."""
        if not self.has_ended:
            processes.kill(self.program, number)

    def end(self, number: int) -> None:
        """Send a signal to the rank, unless it has ended. SIGKILL also goes to its program and all descendants."""
        if self.has_ended:
            return
        is_kill = number == signal.SIGKILL
        for pid in [self.program, *processes.descendants(self.program)] if is_kill else [self.pid]:
            processes.kill(pid, number)

    def set_busy(self, reason: str | None, now: float) -> None:
        """Record the beginning of ``hk.busy``, or its end (``reason=None``)."""
        if reason is None:
            self._note_progress(now)
        self.busy = reason

    def check_stopped(self, now: float) -> bool:
        """Check whether the process is stopped; return True if that has changed."""
        process = processes.stat(self.pid)
        state = "" if process is None else process.state
        has_changed = (state == "T") != (self.stopped_at is not None)
        if has_changed:
            self.stopped_at = now if state == "T" else None
        if has_changed or state == "t":  # held by a debugger
            self._note_progress(now)
        return has_changed

    def skip_pause(self, now: float) -> None:
        """Record that the sentinel itself was stopped until now, so that this time does not count towards a hang."""
        self.stopped_at = None if self.stopped_at is None else now
        self.exiting_since = now
        self._note_progress(now)

    def exits_late(self, now: float) -> bool:
        """Return True if what the rank does after its script's end takes longer than the limit."""
        if self.exiting is None or self.has_ended or self.busy is not None or self.stopped_at is not None:
            self.exiting_since = now
            return False
        return bool(self.exiting.seconds) and now - self.exiting_since > self.exiting.seconds

    def _idle_at_exit(self, state: RecorderState, idle: float, now: float) -> float:
        """Return for how long the rank's exit has made no progress, or 0 if that is within the limits.

        Handlers of the user may take long while they compute, transfer data or wait for a child process. After Python
        has ended, a process frees its memory and libraries end; then computing is no progress, because MPI computes
        while it waits for other ranks. The time in which the process waits for a core does not count.
        """
        exiting = self.exiting
        if exiting is None or exiting.is_bounded or not exiting.seconds:
            return 0.0
        process = processes.stat(self.pid)
        if process is None or process.state in ("D", "t") or abs(process.resident - self._resident) > _CHANGED_PAGES:
            self._resident = 0 if process is None else process.resident
            self._resident_since = now
        ended_at = max(self.exiting_since, self._resident_since, state.python)
        waited = processes.waited_seconds(self.pid)
        if ended_at != self._ended_at:
            self._ended_at = ended_at
            self._waited = waited
        if now - ended_at - (waited - self._waited) > exiting.seconds:
            return now - ended_at
        idle = min(idle, now - self.exiting_since)
        return idle if exiting.patience and idle > exiting.patience else 0.0

    def _note_progress(self, now: float) -> None:
        if self._activity is not None:
            self._activity.note_progress(now)

    def stopped(self, now: float) -> float | None:
        """Return the seconds since the process was stopped, or None."""
        return None if self.stopped_at is None else now - self.stopped_at

    def status(self, now: float) -> Status:
        """Return the rank's state."""
        stopped = self.stopped(now)
        if self._activity is None or self._reader is None:
            return Status(stopped=stopped, busy=self.busy, now=now)
        state = self._reader.state()
        least_cpu = MIN_CPU_FRACTION if self.leaving is None else _LEAST_CPU_AT_EXIT
        idle = self._activity.idle(state, now, least_cpu)
        waits = None
        if state.waiting and now - state.since > _WAITED_SECONDS:
            waits = self._reader.record(state.waiting)
        in_graph = self._waits_in_graph(state, now) if idle > _WAITED_SECONDS and not state.waiting else []
        self._forget_raised()
        idle = self._idle_at_exit(state, idle, now) if self.leaving is not None else idle
        idle = 0.0 if self.busy is not None or stopped is not None else idle
        return Status(
            step=state.step,
            idle=idle,
            count=state.count,
            stopped=stopped,
            busy=self.busy,
            waits=waits,
            in_graph=in_graph,
            last=self._last_ended(state, now),
            has_raised=self.raised_at is not None,
            is_late=self.leaving is not None and idle > 0.0,
            now=now,
        )

    def measured(self) -> Measured:
        """Return the rank's measurements."""
        return Measured() if self._gauge is None else self._gauge.take()

    def _waits_in_graph(self, state: RecorderState, now: float) -> list[CollectiveRecord]:
        """Return the collectives that are pending in the graph in which the training thread is, if it has waited."""
        if now - state.in_graph > _LOOK_SECONDS:
            return []
        pending = [one for one in self.records(_RECENT) if one.end is None and not one.is_eager]
        if not any(now - one.start > _WAITED_SECONDS for one in pending):
            return []
        return sorted(pending, key=lambda one: one.key)[:_MOST_PENDING]

    def _last_ended(self, state: RecorderState, now: float) -> str:
        """Describe the last collective if it ended some time ago; "" otherwise."""
        last = self._reader.record(state.number) if self._reader is not None and state.number else None
        return str(last) if last is not None and last.end is not None and now - last.end > _LAST_SECONDS else ""

    def _forget_raised(self) -> None:
        """Forget an exception once the rank has completed another collective: no rank waits for it any more."""
        after = self.raised_at
        if after is not None and any(one.end is not None and one.start > after for one in self.records(_RECENT)):
            self.raised_at = None

    def exit_status(self) -> int | None:
        """Return the status passed to the C library's ``exit``, or None for a process that ended in another way."""
        if self._status_pipe is None:
            return None
        os.set_blocking(self._status_pipe, False)
        try:
            data = os.read(self._status_pipe, 1)
        except OSError:
            return None
        return data[0] if data else None

    def records(self, limit: int) -> list[CollectiveRecord]:
        """Return its last collectives, up to ``limit``."""
        return [] if self._reader is None else self._reader.records(self._reader.state().number - limit)


class RankGauge:
    """Measures a rank from the records of its collectives and the notes of its training."""

    def __init__(self, reader: FlightReader) -> None:
        self._reader = reader
        self._measured = 0  # number of the last collective of the last step that was measured
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._nbytes = 0

    def take(self) -> Measured:
        """Return the measurements now."""
        self._measure_step()
        step, step_at, examples, loss, saved_step, saved_at, save_seconds, count, nbytes, seconds = self._reader.notes()
        return Measured(
            step=None if step < 0 else step,
            step_at=step_at,
            examples=examples or None,
            loss=None if loss == -math.inf else loss,
            saved_step=None if saved_step < 0 else saved_step,
            saved_at=saved_at,
            save_seconds=save_seconds,
            collectives=count,
            nbytes=nbytes,
            seconds=seconds,
            step_seconds=statistics.median(self._seconds) if self._seconds else None,
            step_bytes=self._nbytes,
        )

    def _measure_step(self) -> None:
        """Measure the last run of each collective of the rank's graphs: those of one step.

        The rank records the last runs every two seconds. If one of them had not ended then, its end is known only if it
        is still the last run at the next time, so nothing is measured before all last runs have ended.
        """
        last = self._reader.state().number
        records = self._reader.records(max(self._measured, last - _RECENT))
        runs = {one.key: one for one in records if not one.is_eager}
        if not runs or any(one.end is None for one in runs.values()):
            return
        self._measured = last
        self._seconds.append(covered_seconds(list(runs.values())))
        self._nbytes = sum(one.nbytes for one in runs.values())


def covered_seconds(records: Sequence[CollectiveRecord]) -> float:
    """Return the seconds in which at least one of these collectives ran: buckets of gradients overlap."""
    total = 0.0
    until = 0.0
    for start, end in sorted((one.start, one.end or one.start) for one in records):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
