"""The process next to a rank: watches it from outside, reports to the coordinator, and ends it on request.

It uses only the standard library, so it starts in about 40 ms and takes 10 MB. ``hvdkit run`` has the engine start
it, and it starts the rank's program::

    python -IS .../hvdkit/watchdog/sentinel.py run

Without ``hvdkit run``, ``hk.init()`` starts it; the numbers are the rank's process, when that began, and descriptors
of a socket to the rank and, in rank 0, of the listening sockets of the coordinator::

    python -IS .../hvdkit/watchdog/sentinel.py watch PID STARTED SOCKET [LISTENER ...]
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import termios
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find the modules below without running hvdkit/__init__.py
    _package = types.ModuleType("hvdkit")
    _package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["hvdkit"] = _package

from hvdkit.machine import processes
from hvdkit.machine.launcher import promised
from hvdkit.watchdog.activity import Activity
from hvdkit.watchdog.channel import CROWDED, NO_ANSWER, STDERR, STDOUT, Closed, Connection, Offer, Output, connect
from hvdkit.watchdog.coordinator import Coordinator
from hvdkit.watchdog.events import (
    Busy,
    Collectives,
    Connect,
    End,
    Exited,
    Flight,
    GiveFlight,
    GiveStacks,
    Joined,
    Leaving,
    Left,
    Message,
    Release,
    Sampled,
    Signal,
    Stacks,
    Status,
    Training,
    Unwound,
    Watching,
    Welcome,
)
from hvdkit.watchdog.flight import FlightReader, Record, State
from hvdkit.watchdog.output import write_line
from hvdkit.watchdog.settings import Settings

# "PORT TOKEN ADDRESS..." of `hvdkit run`, or the path of a private file that contains it: an engine may write values of
# variables on command lines, which every user of the host can read.
RUN_VARIABLE = "HVDKIT_RUN"
# "DESCRIPTOR INODE" of the socket to the sentinel, in the environment of a program that `hvdkit run` started. A program
# that only inherits the variable has another file, or no file, at that number.
SOCKET_VARIABLE = "HVDKIT_SENTINEL"
SIGNALS_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
# Seconds for a program to end after the coordinator is gone. Its children, which hold its pipes, are ended if they have
# written nothing for the second number of seconds after its end, or are still there after the third one.
_ORPHAN_SECONDS, _DRAIN_SECONDS, _CHILDREN_SECONDS = 5.0, 0.3, 2.0
# Most bytes that a pipe holds, for users other than root; and that are read at once.
_PIPE_BYTES, _READ_BYTES = 1 << 20, 1 << 16
# Seconds in a collective after which a rank reports it: another rank may wait for it in another collective.
_WAITED_SECONDS = 3.0
_LOOK_SECONDS = 0.5
_CHECK_SECONDS = 0.05
# Seconds that a rank has to end itself at its deadline, that an interpreter has to shut down, and that a program has
# after SIGTERM which does not use hvdkit. SIGKILL follows, with which the exit code is lost.
_KILL_SECONDS, _SHUTDOWN_SECONDS, _TERM_SECONDS = 3.0, 5.0, 2.0
_RECONNECT_SECONDS, _RETRY_SECONDS, _LAST_SECONDS = 5.0, 0.2, 3.0
# Seconds after the end of rank 0 in which others may connect; seconds before a warning about one that cannot.
_JOIN_SECONDS, _WARN_SECONDS = 5.0, 1.0
_STACKS_SECONDS, _SAMPLE_SECONDS = 2.0, 0.2
_LONGEST_FILE = 4096
# A program that ends within these seconds of a signal has ended because of it.
_SIGNALLED_SECONDS = 60.0


class Rank:
    """The rank's process, seen from here, and the socket to it.

    Attributes:
        pid: its process: the program, or the process in it that has called ``hk.init()``.
        training: it has called ``hk.init()``.
        busy: the reason of an open ``hk.busy``, or None.
        stopped_at: when it was first seen stopped, or None.
        leaving: its script has ended.
        has_ended: its process has ended: another one may have its PID.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.connection: Connection | None = None
        self.training: Training | None = None
        self.busy: str | None = None
        self.stopped_at: float | None = None
        self.leaving = self.has_ended = False
        self._reader: FlightReader | None = None
        self._status_pipe: int | None = None
        self._activity: Activity | None = None

    def take_files(self, received: socket.socket) -> None:
        """Take the descriptors that the rank sends before its first message: see ``reporter.Reporter``."""
        _, files, _, _ = socket.recv_fds(received, 1, 2)
        if len(files) == 2:
            self._reader, self._status_pipe = FlightReader(files[0]), files[1]
            os.close(files[0])

    def trains(self, training: Training, now: float) -> None:
        """Note that it has called ``hk.init()``, in the program that was started or in a process below it.

        Another PID is that of a container: on this host it may be any process.
        """
        self.training = training
        if training.pid in (self.pid, *processes.descendants(os.getpid())):
            self.pid = training.pid
        self._activity = Activity(self.pid, training.waiters, now)

    @property
    def state(self) -> State | None:
        """How far it is, or None for a program that does not use hvdkit."""
        return None if self._reader is None else self._reader.state()

    @property
    def step(self) -> int | None:
        """Steps trained, or None."""
        return None if self._reader is None else self._reader.state().step

    def kill(self, pid: int, number: int) -> None:
        """Send a signal to its process, or to one that it has started, unless it has ended."""
        if not self.has_ended:
            processes.kill(pid, number)

    def set_busy(self, reason: str | None, now: float) -> None:
        """Note the begin or the end of ``hk.busy``."""
        if reason is None:
            self._moved(now)
        self.busy = reason

    def look(self, now: float) -> bool:
        """See whether it is stopped; return True if that has changed."""
        found = processes.stat(self.pid)
        is_stopped, was = found is not None and found.state == "T", self.stopped_at is not None
        if found is not None and found.state == "t":  # held by a debugger
            self._moved(now)
        if is_stopped != was:
            self.stopped_at = now if is_stopped else None
            self._moved(now)
        return is_stopped != was

    def went_on(self, now: float) -> None:
        """Note that the sentinel itself was stopped until now: what it has not seen is no sign of a hang."""
        self.stopped_at = None if self.stopped_at is None else now
        self._moved(now)

    def _moved(self, now: float) -> None:
        if self._activity is not None:
            self._activity.moved(now)

    def status(self, now: float) -> Status:
        """Return how it is doing."""
        state = self.state
        stopped = None if self.stopped_at is None else now - self.stopped_at
        if state is None or self._activity is None or self._reader is None:
            return Status(stopped=stopped, busy=self.busy, now=now)
        idle = self._activity.idle(state, now)
        waits = None
        if state.waiting and now - state.since > _WAITED_SECONDS:
            waits = self._reader.record(state.waiting)
        idle = 0.0 if self.busy is not None or self.leaving or stopped is not None else idle
        return Status(
            step=state.step, idle=idle, count=state.count, stopped=stopped, busy=self.busy, waits=waits, now=now
        )

    def exit_status(self) -> int | None:
        """Return the exit status that the C library was given, or None if the process did not exit that way."""
        if self._status_pipe is None:
            return None
        os.set_blocking(self._status_pipe, False)
        try:
            data = os.read(self._status_pipe, 1)
        except OSError:
            return None
        return data[0] if data else None

    def records(self, most: int) -> list[Record]:
        """Return its last collectives, at most ``most``."""
        return [] if self._reader is None else self._reader.records(self._reader.state().number - most)


class Sentinel(ABC):
    """Watches one rank.

    Args:
        rank: to watch.
    """

    def __init__(self, rank: Rank) -> None:
        self.selector = selectors.DefaultSelector()
        self.rank = rank
        self.up: Connection | None = None
        self.coordinator: Coordinator | None = None
        self._own: Any = None  # this rank's member of the coordinator in this process
        self.welcome: Welcome | None = None
        self.ending = False  # the job has failed, or is over
        self.released = False
        self._kill_at: float | None = None
        self._exit: tuple[float, int] | None = None  # when the rank has to end itself, and with which code
        self._reported_at = self._looked_at = 0.0
        self._stacks_at: float | None = None
        self._flight_at: float | None = None
        self._most = 0
        self._turned = time.monotonic()
        self._noted = 0  # number of the last collective that was reported to be compared
        self._open: dict[int, str] = {}  # collectives that have begun, of which the end was not reported

    # ---- what happens -----------------------------------------------------------------------------------------

    def turn(self, most: float = 1e9) -> None:
        """Wait for something to happen, and deal with it."""
        now = time.monotonic()
        for key, events in self.selector.select(min(most, self._pause(now))):
            if key.data == "up":
                self._hear_coordinator(events)
            elif key.data == "rank":
                self._hear_rank(events)
            elif callable(key.data):
                key.data(key.fd)
            elif self.coordinator is not None:
                self.coordinator.ready(key, events)
        now = time.monotonic()
        if now - self._turned > 2.0 + self._pause(now):
            self.rank.went_on(now)
        self._turned = now
        self._tick(now)
        if self.coordinator is not None:
            self.coordinator.tick(now)

    def _pause(self, now: float) -> float:
        pauses = [_LOOK_SECONDS]
        if self.welcome is not None and self.welcome.check:
            pauses.append(_CHECK_SECONDS)
        pauses += [at - now for at in (self._kill_at, self._stacks_at, self._flight_at) if at is not None]
        if self.coordinator is not None:
            pauses.append(self.coordinator.pause(now))
        return max(0.0, min(pauses))

    def report(self, message: Message) -> None:
        """Report to the coordinator."""
        if self.coordinator is not None:
            if self._own is not None:
                self.coordinator.take(self._own, message, time.monotonic())
        elif self.up is not None:
            self.up.send(message)

    def _tick(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self.end_rank(signal.SIGKILL)
        if self._exit is not None and now >= self._exit[0]:
            self.tell_rank(End(code=self._exit[1]))
            self._exit = None
        has_changed = False
        if now - self._looked_at >= _LOOK_SECONDS and not self.rank.has_ended:
            self._looked_at = now
            has_changed = self.rank.look(now)
        if self.welcome is None:
            return
        if self.welcome.check:
            self._report_collectives()
        if not self.rank.has_ended and (has_changed or now - self._reported_at >= self.welcome.interval):
            self._reported_at = now
            self.report(self.rank.status(now))
        if self.up is not None and self.welcome.heartbeat and self.up.is_cut_off(self.welcome.heartbeat):
            self._lose(is_cut_off=True)
        if self._flight_at is not None and now >= self._flight_at:
            self._flight_at = None
            self.report(Flight(records=self.rank.records(self._most)))
        if self._stacks_at is not None and now >= self._stacks_at:
            self._stacks_at = None
            self.report(Stacks(text="it does not answer, so that its stacks are not known"))

    def _report_collectives(self) -> None:
        """Report what has begun and ended since the last time."""
        reader = self.rank._reader
        if reader is None:
            return
        over = [number for number in self._open if (found := reader.record(number)) is None or found.end is not None]
        ended = [self._open.pop(number) for number in over]
        begun = reader.records(self._noted)
        for record in begun:
            self._noted = record.number
            if record.end is None:
                self._open[record.number] = record.key
        if ended or begun:
            self.report(Collectives(ended=ended, begun=begun))

    # ---- the rank ---------------------------------------------------------------------------------------------

    def listen_to_rank(self, connected: socket.socket) -> None:
        """Hear the rank's process over a socket, of which it has the other end."""

        def first(_: int) -> None:
            self.selector.unregister(connected)
            try:
                self.rank.take_files(connected)
            except OSError:
                return
            self.rank.connection = Connection(connected, self.selector, "rank")
            self.tell_rank(Watching(pid=os.getpid()))

        self.selector.register(connected, selectors.EVENT_READ, first)

    def _hear_rank(self, events: int) -> None:
        connection = self.rank.connection
        assert connection is not None
        if events & selectors.EVENT_WRITE:
            connection.flush()
        try:
            for message in connection.receive():
                if isinstance(message, Message):
                    self._take(message, time.monotonic())
        except Closed:
            connection.close()
            self.rank.connection = None

    def _take(self, message: Message, now: float) -> None:
        if isinstance(message, Busy):
            self.rank.set_busy(message.reason, now)
            self._reported_at = 0.0
        else:
            if isinstance(message, Training):
                self.rank.trains(message, now)
                self.rank.leaving = self.released = False
            elif isinstance(message, Leaving):
                self.rank.leaving = True
                if self.up is None and self.coordinator is None:
                    self.tell_rank(Release(all_leave=True))
            elif isinstance(message, Unwound):
                self._exit = None
                self._kill_at = None if self._kill_at is None else self._kill_at + _SHUTDOWN_SECONDS
            elif isinstance(message, Stacks):
                self._stacks_at = None
            elif isinstance(message, Sampled):
                self._flight_at = 0.0
                return
            self.report(message)

    def tell_rank(self, message: Message) -> bool:
        """Send ``message`` to the rank's process; return False if it does not listen."""
        if self.rank.connection is None:
            return False
        self.rank.connection.send(message)
        return True

    def end_rank(self, number: int) -> None:
        """Send a signal to the rank; SIGKILL ends its child processes, too."""
        pid = self.program_pid if number == signal.SIGKILL else self.rank.pid
        below = processes.descendants(pid) if number == signal.SIGKILL else []
        for one in (pid, *below):
            self.rank.kill(one, number)

    @property
    def program_pid(self) -> int:
        """The process that the rank's launcher, or this sentinel, has started."""
        return self.rank.pid

    # ---- the coordinator --------------------------------------------------------------------------------------

    @abstractmethod
    def lost(self, *, is_cut_off: bool) -> None:
        """The connection to the coordinator has ended, or its host has not answered for the heartbeat's limit."""

    def _hear_coordinator(self, events: int) -> None:
        assert self.up is not None
        if events & selectors.EVENT_WRITE:
            self.up.flush()
        try:
            for message in self.up.receive():
                if isinstance(message, Message):
                    self.obey(message)
        except Closed as closed:
            self._lose(is_cut_off=closed.errno in NO_ANSWER)

    def _lose(self, *, is_cut_off: bool) -> None:
        assert self.up is not None
        self.up.close()
        self.up = None
        self.lost(is_cut_off=is_cut_off)

    def obey(self, order: Message) -> None:
        """Do what the coordinator orders."""
        now = time.monotonic()
        if isinstance(order, Signal):
            self.end_rank(order.number)
        elif isinstance(order, GiveStacks):
            self._stacks_at = now + _STACKS_SECONDS if self.tell_rank(order) else now
        elif isinstance(order, GiveFlight):
            self._most = order.most
            is_asked = self.rank.stopped_at is None and self.tell_rank(order)
            self._flight_at = now + _SAMPLE_SECONDS if is_asked else now
        elif isinstance(order, Release):
            self.released = True
            self.tell_rank(order)
        elif isinstance(order, End):
            self._end(order, now)

    def _end(self, order: End, now: float) -> None:
        self.ending = True
        if self.rank.stopped_at is not None:
            self._kill_at = now
        elif self.rank.training is not None and self.tell_rank(order):
            self._exit = (now + order.unwind, order.code) if order.unwind else None
            self._kill_at = now + order.unwind + _KILL_SECONDS
        else:
            self.end_rank(signal.SIGTERM)
            self._kill_at = now + _TERM_SECONDS


class WatchingSentinel(Sentinel):
    """Watches a process that a launcher has started.

    Args:
        pid: the rank's process.
        started: when it began, by the kernel's clock.
        connected: socket to it.
        listeners: of the coordinator, in rank 0.
    """

    def __init__(self, pid: int, started: int, connected: socket.socket, listeners: Sequence[socket.socket]) -> None:
        super().__init__(Rank(pid))
        self._started, self._listeners = started, listeners
        own = processes.stat(pid)
        self._launcher, self._has_ended_launcher = own.parent if own is not None else 0, False
        self._is_over = self._has_left = False
        self._connect: Connect | None = None
        self._left_at: float | None = None
        self._ended_at = math.inf
        self._warning: tuple[float, str] | None = None  # when it will be written, unless the rank leaves before
        self.listen_to_rank(connected)
        # Before Linux 5.3, or with a Python built for an old C library, /proc is polled instead.
        with contextlib.suppress(OSError, AttributeError):
            self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, self._process_ended)

    def run(self) -> int:
        """Watch until the rank has ended, and in rank 0 until the job has."""
        while not self._is_over:
            self.turn()
            self._is_over = self._is_over or processes.is_over(self.rank.pid, self._started)
        self.rank.has_ended, self._ended_at = True, time.monotonic()
        self._drain()
        code = 0 if self._has_left else self.rank.exit_status()
        self.report(Exited(code=code, step=self.rank.step, busy=self.rank.busy))
        until = time.monotonic() + _LAST_SECONDS
        # If it has failed, the coordinator asks for its last collectives.
        while (
            self.up is not None and time.monotonic() < until and (self.up.unsent or (code != 0 and not self.released))
        ):
            self.turn(0.1)
        while self.coordinator is not None and not self._is_coordinated():
            self.turn()
        return 0

    def _process_ended(self, file: int) -> None:
        self.selector.unregister(file)
        self._is_over = True

    def _take(self, message: Message, now: float) -> None:
        if isinstance(message, Connect):
            self.join(message)
        elif isinstance(message, Left):
            self._is_over = self._has_left = True
        else:
            super()._take(message, now)

    def _drain(self) -> None:
        """Read what the rank has sent before its end."""
        for _ in range(20):
            if self.rank.connection is None:
                return
            self._hear_rank(selectors.EVENT_READ)
            if not self.selector.select(0):
                return

    def _is_coordinated(self) -> bool:
        """Return True once the coordinator in this process is not needed any more."""
        assert self.coordinator is not None
        now = time.monotonic()
        if self.coordinator.over:  # sentinels of others may still connect, to report that their ranks have left
            return self.coordinator.all_ended or now > self._ended_at + _JOIN_SECONDS
        if self.coordinator.verdict is None:
            return False
        self._left_at = self._left_at or now + self.coordinator.settings.unwind + 2 * _LAST_SECONDS
        return now > self._left_at

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if self._warning is not None and now >= self._warning[0]:
            if not self.rank.leaving:
                write_line(self._warning[1])
            self._warning = None
        if self.coordinator is not None and self.coordinator.has_lost_hosts and not self._has_ended_launcher:
            self._has_ended_launcher = True
            processes.end_stuck_launcher(self._launcher)

    def join(self, connect_to: Connect) -> None:
        """Join the coordinator of the job, or become it."""
        self._connect = connect_to
        joined = Joined(rank=connect_to.rank, size=connect_to.size, host=connect_to.host, place=processes.place())
        offer = Offer.parse(connect_to.offer)
        if self._listeners:
            settings = Settings.from_environment()
            processes.allow_files(connect_to.size)
            self.coordinator = Coordinator(
                connect_to.size, settings, self.selector, self._listeners, offer.token, write=write_line
            )
            self._own = self.coordinator.join(joined, self.obey)
            self.welcome = settings.welcome(connect_to.size)
            return
        try:
            self.up, self.welcome = connect(offer, joined, self.selector, "up")
        except ConnectionRefusedError as error:
            write_line(f"hvdkit: watchdog: rank {joined.rank} on {joined.host}: {error}")
        except OSError as error:
            text = (
                f"hvdkit: watchdog: rank {joined.rank} on {joined.host} cannot reach rank 0 on {connect_to.chief_host} "
                f"({error}), so that its failure is noticed late or not at all; let ranks connect to each other, or "
                "name the network by HOROVOD_GLOO_IFACE"
            )
            self._warning = time.monotonic() + _WARN_SECONDS, text

    def lost(self, *, is_cut_off: bool) -> None:
        """Reconnect if rank 0's sentinel was only killed and comes back; otherwise end this rank."""
        if self.ending or self.released or self._connect is None or self._is_over:
            return
        until, training = time.monotonic() + _RECONNECT_SECONDS, self.rank.training
        joined = Joined(
            rank=self._connect.rank, size=self._connect.size, host=self._connect.host, place=processes.place()
        )
        offer = Offer.parse(self._connect.offer)
        while not is_cut_off and (left := until - time.monotonic()) > _RETRY_SECONDS:
            time.sleep(_RETRY_SECONDS)
            with contextlib.suppress(OSError):
                self.up, self.welcome = connect(offer, joined, self.selector, "up", left)
                if training is not None:
                    self.report(training)
                if self.rank.leaving:
                    self.report(Leaving(step=self.rank.step))
                return
        if self._connect.speaks:
            step = "" if self.rank.step is None else f" at step {self.rank.step}"
            cause = "its host is down, the network is cut, or its sentinel was killed"
            write_line(f"hvdkit: rank 0 on {self._connect.chief_host} is out of reach{step} ({cause})")
        self._end(End(code=1), time.monotonic())


class RunningSentinel(Sentinel):
    """Starts the rank's program for ``hvdkit run``, and forwards its output.

    Args:
        offer: where ``hvdkit run`` listens.
        joined: which rank this is.

    Raises:
        OSError: ``hvdkit run`` cannot be reached.
    """

    def __init__(self, offer: Offer, joined: Joined) -> None:
        super().__init__(Rank(0))
        self.up, self.welcome = connect(offer, joined, self.selector, "up")
        self._status: int | None = None
        self._read_at = 0.0  # when output was there last
        # Those that came to this process from others than `hvdkit run`, and when.
        self._signals: list[tuple[int, float]] = []
        self._outputs: dict[int, int] = {}
        wakeup, writer = os.pipe()
        for file in (wakeup, writer):
            os.set_blocking(file, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handled = (*SIGNALS_PASSED_ON, signal.SIGCHLD)
        for number in handled:
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)  # a launcher may have blocked some
        self.selector.register(wakeup, selectors.EVENT_READ, self._signalled)
        assert self.welcome.program is not None
        self._start(self.welcome.program)

    def _start(self, program: dict[str, Any]) -> None:
        terminal = program["terminal"]
        outputs = {STDOUT: _pipe(terminal), STDERR: _pipe(terminal)}
        mine, theirs = socket.socketpair()
        found = os.fstat(theirs.fileno())
        environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
        environment |= {**program["environment"], SOCKET_VARIABLE: f"{theirs.fileno()} {found.st_ino}"}
        command = [word.encode("latin-1") for word in program["command"]]  # bytes, in JSON
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                processes.signal_at_parent_end()
                if os.getppid() != me:
                    os._exit(137)
                os.dup2(outputs[STDOUT][1], 1)
                os.dup2(outputs[STDERR][1], 2)
                os.set_inheritable(theirs.fileno(), True)
                for number in (*SIGNALS_PASSED_ON, signal.SIGCHLD, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                os.execvpe(command[0], command, environment)
            except OSError as error:
                os.write(2, b"hvdkit run: %b: %b\n" % (command[0], str(error.strerror).encode()))
                os._exit(127 if isinstance(error, FileNotFoundError) else 126)
            finally:
                os._exit(126)
        self.rank.pid = self._pid = pid
        for channel, (reader, written) in outputs.items():
            os.close(written)
            self._outputs[reader] = channel
            self.selector.register(reader, selectors.EVENT_READ, self._forward)
        theirs.close()
        self.listen_to_rank(mine)

    def run(self) -> int:
        """Serve until the program has ended; return its exit code as a shell would."""
        while self._status is None:
            self.turn()
        self._drain()
        stopped = None if self.rank.stopped_at is None else time.monotonic() - self.rank.stopped_at
        self.report(
            Exited(
                code=self._status,
                step=self.rank.step,
                busy=self.rank.busy,
                signals=[number for number, at in self._signals if time.monotonic() - at < _SIGNALLED_SECONDS],
                stopped=stopped,
            )
        )
        # While this process lives, the engine does not know that the rank has ended, and lets other ranks save.
        while self.up is not None and (self.up.unsent or not self.released):
            self.turn()
        return self._status if self._status >= 0 else 128 - self._status

    def _drain(self) -> None:
        """End the program's children after a while, and forward what all have written before."""
        self._read_at = now = time.monotonic()
        until = now + _CHILDREN_SECONDS
        while (self._outputs or self.rank.connection is not None) and now < min(self._read_at + _DRAIN_SECONDS, until):
            self.turn(0.05)
            now = time.monotonic()
        processes.end_descendants()
        for file in list(self._outputs):  # a process that cannot be killed may still hold it
            os.set_blocking(file, False)
            for _ in range(_PIPE_BYTES // _READ_BYTES):
                if not self._read(file):
                    break

    @property
    def program_pid(self) -> int:
        return self._pid

    def _signalled(self, file: int) -> None:
        for number in os.read(file, 64):
            if number != signal.SIGCHLD:
                self._signals.append((number, time.monotonic()))
                self.rank.kill(self._pid, number)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)  # orphans of the program among them
                if not pid:
                    return
                if pid == self._pid:
                    self._status, self.rank.has_ended = os.waitstatus_to_exitcode(status), True

    def _forward(self, file: int) -> None:
        self._read_at = time.monotonic()
        if self.up is not None and self.up.unsent > CROWDED:  # `hvdkit run` pauses, and so does the program
            time.sleep(0.01)
            return
        self._read(file)

    def _read(self, file: int) -> bool:
        """Forward what can be read from ``file`` at once; return False if that is nothing."""
        try:
            data = os.read(file, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose writers are gone
            data = b""
        if data and self.up is not None:
            self.up.send(Output(self._outputs[file], data))
        elif not data:
            self.selector.unregister(file)
            os.close(file)
            del self._outputs[file]
        return bool(data)

    def lost(self, *, is_cut_off: bool) -> None:
        """``hvdkit run`` is gone, or out of reach: nothing else would ever end this rank."""
        self.rank.kill(self._pid, signal.SIGCONT)
        self.rank.kill(self._pid, signal.SIGTERM)
        self._kill_at = time.monotonic() + _ORPHAN_SECONDS


def _pipe(terminal: dict[str, int] | None) -> tuple[int, int]:
    """Return reader and writer of a pipe, or of a terminal as wide as the one that shows it, for progress bars."""
    if terminal is None:
        return os.pipe()
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", terminal["lines"], terminal["columns"], 0, 0))
    modes = termios.tcgetattr(writer)
    modes[1] &= ~termios.OPOST  # line ends stay as they were written
    termios.tcsetattr(writer, termios.TCSANOW, modes)
    os.set_inheritable(writer, False)
    return reader, writer


def offered() -> Offer:
    """Return what the variable, or the private file that it names, says of ``hvdkit run``."""
    text = os.environ[RUN_VARIABLE]
    return Offer.parse(read_private(text) if text.startswith("/") else text)


def read_private(path: str) -> str:
    """Return the text of a file that only this user can have written, in a folder of which the same holds.

    Raises:
        OSError: another user may have written it.
    """
    folder = path.rpartition("/")[0]
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for what, found, is_kind in (
            (folder, os.lstat(folder), stat.S_ISDIR),
            (path, os.fstat(file), stat.S_ISREG),
        ):
            if not is_kind(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise OSError(f"{what} is not private: user {found.st_uid}, mode {found.st_mode:o}; start again")
        return os.read(file, _LONGEST_FILE).decode()
    finally:
        os.close(file)


def main(arguments: Sequence[str]) -> int:
    """Watch a rank, or run one; return the exit code."""
    mode, *rest = arguments
    if mode == "watch":
        pid, started, file, *listeners = map(int, rest)
        if os.fork():  # the rank must not find this process among its children
            return 0
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)  # it ends with its rank
        sockets = [socket.socket(fileno=listener) for listener in listeners]
        return WatchingSentinel(pid, started, socket.socket(fileno=file), sockets).run()
    host = socket.gethostname()
    processes.adopt_orphans()
    promise = promised()
    joined = Joined(rank=promise.rank, size=promise.size, host=host, place=processes.place())
    try:
        sentinel = RunningSentinel(offered(), joined)
    except (OSError, ValueError) as error:
        print(f"hvdkit run: on {host}: {error}", file=sys.stderr)
        return 1
    return sentinel.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
