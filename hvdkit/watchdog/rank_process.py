"""The sentinel's view of its rank's process."""

from __future__ import annotations

import os
import signal
import socket

from hvdkit.machine import processes
from hvdkit.watchdog.activity import Activity
from hvdkit.watchdog.channel import Connection
from hvdkit.watchdog.events import Collectives, Leaving, Status, Training
from hvdkit.watchdog.flight_recorder import CollectiveRecord, FlightReader

# Seconds in a collective after which it is reported: another rank may wait for this one in another collective.
_WAITED_SECONDS = 3.0


class RankProcess:
    """The sentinel's view of its rank's process, and the socket to it.

    Attributes:
        program: PID of the process that the launcher or the sentinel started.
        pid: PID of the process that called ``hk.init()``: the program or a descendant.
        connection: messages to and from the process, or None.
        training: the rank's message that it called ``hk.init()``, or None.
        busy: the reason of an open ``hk.busy``, or None.
        stopped_at: when it was first seen stopped, or None.
        leaving: the rank's message that its script has ended, or None.
        has_ended: True once the process has ended, after which its PID may be reused, or has left the world.
    """

    def __init__(self, pid: int) -> None:
        self.program = self.pid = pid
        self.connection: Connection | None = None
        self.training: Training | None = None
        self.busy: str | None = None
        self.stopped_at: float | None = None
        self.leaving: Leaving | None = None
        self.has_ended = False
        self._reader: FlightReader | None = None
        self._status_pipe: int | None = None
        self._activity: Activity | None = None
        self._last_reported = 0  # number of the last collective that :meth:`collectives` returned
        self._pending: dict[int, str] = {}  # keys of collectives returned as begun, not yet as ended

    def receive_files(self, received: socket.socket) -> None:
        """Receive the descriptors that the rank sends before its first message: see ``reporter.Reporter``."""
        _, files, _, _ = socket.recv_fds(received, 1, 2)
        if len(files) == 2:
            self._reader, self._status_pipe = FlightReader(files[0]), files[1]
            os.close(files[0])

    def begin_training(self, training: Training, now: float) -> None:
        """Record that ``hk.init()`` was called, in the program or in one of its descendants.

        Any other PID belongs to a container's namespace, and could be any process on this host.
        """
        self.training, self.leaving = training, None
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
        self._note_progress(now)

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
        idle, waits = self._activity.idle(state, now), None
        if state.waiting and now - state.since > _WAITED_SECONDS:
            waits = self._reader.record(state.waiting)
        idle = 0.0 if self.busy is not None or self.leaving is not None or stopped is not None else idle
        return Status(
            step=state.step, idle=idle, count=state.count, stopped=stopped, busy=self.busy, waits=waits, now=now
        )

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

    def collectives(self) -> Collectives | None:
        """Return the collectives that have begun or ended since the last call, or None."""
        reader = self._reader
        if reader is None:
            return None
        records = {number: reader.record(number) for number in self._pending}
        ended = [self._pending.pop(number) for number, one in records.items() if one is None or one.end is not None]
        begun = reader.records(self._last_reported)
        for record in begun:
            self._last_reported = record.number
            if record.end is None:
                self._pending[record.number] = record.key
        return Collectives(ended=ended, begun=begun) if ended or begun else None
