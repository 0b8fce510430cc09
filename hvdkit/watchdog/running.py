"""The sentinel under ``hvdkit run``: an engine starts one per rank, and it starts the rank's program."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import termios
import time
from typing import Any

from hvdkit.machine import processes
from hvdkit.machine.launcher import launched_rank
from hvdkit.watchdog.base import Sentinel
from hvdkit.watchdog.channel import CROWDED, STDERR, STDOUT, Offer, Output, connect
from hvdkit.watchdog.events import Exited, HoldOutput, Joined, Message
from hvdkit.watchdog.rank_process import RankProcess
from hvdkit.watchdog.settings import RUN_VARIABLE, SOCKET_VARIABLE

_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
# Seconds for a program to end after the coordinator is gone. Seconds without output and computation, and seconds in
# total, after which children that outlive the program and hold its pipes are ended.
_ORPHAN_SECONDS = 5.0
_DRAIN_SECONDS = 0.3
_CHILDREN_SECONDS = 2.0
# Maximum capacity of a pipe for users other than root; bytes per read.
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_LONGEST_FILE = 4096
# Seconds after a signal within which the end of the program is attributed to it.
_SIGNALLED_SECONDS = 60.0


class RunningSentinel(Sentinel):
    """Starts the rank's program for ``hvdkit run``, and forwards its output. Raises OSError if it cannot connect."""

    def __init__(self, offer: Offer, joined: Joined) -> None:
        super().__init__(RankProcess(0))
        self.uplink, self.welcome = connect(offer, joined, self.selector, "uplink")
        self._exit_status: int | None = None
        self._read_at = 0.0  # when output was last available
        # Signals that other processes than `hvdkit run` sent to this one, and when.
        self._signals: list[tuple[int, float]] = []
        self._outputs: dict[int, int] = {}
        self._is_within_line = False  # whether the last line on standard error is incomplete
        self._is_held = False  # `hvdkit run` does not accept output now
        wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handled = (*_FORWARDED_SIGNALS, signal.SIGCHLD)
        for number in handled:
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)  # a launcher may have blocked some
        self.selector.register(wakeup, selectors.EVENT_READ, self._handle_signals)
        assert self.welcome.program is not None
        self._start(self.welcome.program)

    def _start(self, program: dict[str, Any]) -> None:
        terminal = program["terminal"]
        outputs = {STDOUT: _pipe(terminal), STDERR: _pipe(terminal)}
        sentinel_end, program_end = socket.socketpair()
        inode = os.fstat(program_end.fileno()).st_ino
        environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
        environment |= {**program["environment"], SOCKET_VARIABLE: f"{program_end.fileno()} {inode}"}
        command = [argument.encode("latin-1") for argument in program["command"]]  # bytes, in JSON
        sentinel_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                processes.signal_at_parent_end()
                if os.getppid() != sentinel_pid:
                    os._exit(137)
                os.dup2(outputs[STDOUT][1], 1)
                os.dup2(outputs[STDERR][1], 2)
                os.set_inheritable(program_end.fileno(), True)
                for number in (*_FORWARDED_SIGNALS, signal.SIGCHLD, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                os.execvpe(command[0], command, environment)
            except OSError as error:
                os.write(2, b"hvdkit run: %b: %b\n" % (command[0], str(error.strerror).encode()))
                os._exit(127 if isinstance(error, FileNotFoundError) else 126)
            finally:
                os._exit(126)
        self.rank.program = self.rank.pid = pid
        for channel, (reader, writer) in outputs.items():
            os.close(writer)
            self._outputs[reader] = channel
            self.selector.register(reader, selectors.EVENT_READ, self._forward)
        program_end.close()
        self.attach_rank(sentinel_end)

    def run(self) -> int:
        """Serve until the program has ended; return its exit code as a shell reports it."""
        while self._exit_status is None:
            self.turn()
        self._drain()
        now = time.monotonic()
        rank = self.rank
        signals = [number for number, at in self._signals if now - at < _SIGNALLED_SECONDS]
        code = self._exit_status
        stopped = rank.stopped(now)
        self.report(Exited(code=code, step=rank.step, busy=rank.busy, signals=signals, stopped=stopped))
        # As long as this process runs, the engine does not see the end of the rank, and other ranks can save.
        while self.uplink is not None and (self.uplink.unsent or not self.released):
            self.turn()
        return self._exit_status if self._exit_status >= 0 else 128 - self._exit_status

    def _drain(self) -> None:
        """Forward the remaining output of the program and its children, and end children that remain."""
        self._read_at = now = time.monotonic()
        until = now + _CHILDREN_SECONDS
        while (self._outputs or self.rank.connection is not None) and now < min(self._read_at + _DRAIN_SECONDS, until):
            self.turn(0.05)
            now = time.monotonic()
            # On a busy host, children wait for a core before they write.
            if now >= self._read_at + _DRAIN_SECONDS and self._are_children_running():
                self._read_at = now
        processes.end_descendants()
        for file in list(self._outputs):  # a process that cannot be killed may still hold it
            os.set_blocking(file, False)
            for _ in range(_PIPE_BYTES // _READ_BYTES):
                if not self._read(file):
                    break

    def _are_children_running(self) -> bool:
        found = map(processes.stat, processes.descendants(os.getpid()))
        return any(process is not None and process.state in "RD" for process in found)

    def obey(self, order: Message) -> None:
        """Carry out an order of ``hvdkit run``."""
        if isinstance(order, HoldOutput):
            self._is_held = order.hold
        super().obey(order)

    def write_line(self, text: str) -> None:
        """Send a line as output of the program: ``hvdkit run`` writes it to its own output and to the rank's log."""
        if self.uplink is not None:
            start = b"\n" * self._is_within_line
            self._is_within_line = False
            self.uplink.send(Output(STDERR, start + text.encode(errors="replace") + b"\n"))

    def _handle_signals(self, file: int) -> None:
        for number in os.read(file, 64):
            if number != signal.SIGCHLD:
                self._signals.append((number, time.monotonic()))
                self.rank.signal(number)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)  # includes orphans of the program
                if not pid:
                    return
                if pid == self.rank.program:
                    self._exit_status = os.waitstatus_to_exitcode(status)
                    self.rank.has_ended = True

    def _forward(self, file: int) -> None:
        self._read_at = time.monotonic()
        is_held = self._is_held and self._exit_status is None
        if self.uplink is not None and (is_held or self.uplink.unsent > CROWDED):
            time.sleep(0.01)  # the program pauses as well, once its pipe is full
            return
        self._read(file)

    def _read(self, file: int) -> bool:
        """Forward available output of ``file``; return False if there isn't any."""
        try:
            data = os.read(file, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose writers are gone
            data = b""
        if data and self.uplink is not None:
            channel = self._outputs[file]
            if channel == STDERR:
                self._is_within_line = not data.endswith(b"\n")
            self.uplink.send(Output(channel, data))
        elif not data:
            self.selector.unregister(file)
            os.close(file)
            del self._outputs[file]
        return bool(data)

    def handle_disconnect(self, *, is_cut_off: bool) -> None:
        """End this rank: ``hvdkit run`` is gone or unreachable, and would never end it."""
        self.rank.signal(signal.SIGCONT)
        self.rank.signal(signal.SIGTERM)
        self.timers[self.kill] = time.monotonic() + _ORPHAN_SECONDS


def _pipe(terminal: dict[str, int] | None) -> tuple[int, int]:
    """Return reader and writer of a pipe, or of a terminal with the size of the user's, for progress bars."""
    if terminal is None:
        return os.pipe()
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", terminal["lines"], terminal["columns"], 0, 0))
    modes = termios.tcgetattr(writer)
    modes[1] &= ~termios.OPOST  # keep line ends as written
    termios.tcsetattr(writer, termios.TCSANOW, modes)
    os.set_inheritable(writer, False)
    return reader, writer


def read_offer() -> Offer:
    """Return the offer of ``hvdkit run`` from the variable, or from the private file that it names."""
    text = os.environ[RUN_VARIABLE]
    return Offer.parse(read_private(text) if text.startswith("/") else text)


def read_private(path: str) -> str:
    """Return the text of a file. Raises OSError unless only this user can access it and its folder."""
    folder = path.rpartition("/")[0]
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name, status, is_kind in (
            (folder, os.lstat(folder), stat.S_ISDIR),
            (path, os.fstat(file), stat.S_ISREG),
        ):
            if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise OSError(f"{name} is not private: user {status.st_uid}, mode {status.st_mode:o}; start again")
        return os.read(file, _LONGEST_FILE).decode()
    finally:
        os.close(file)


def run() -> int:
    """Run the rank's program; return its exit code."""
    host = socket.gethostname()
    processes.adopt_orphans()
    launched = launched_rank()
    joined = Joined(rank=launched.rank, size=launched.size, host=host, place=processes.place())
    try:
        sentinel = RunningSentinel(read_offer(), joined)
    except (OSError, ValueError) as error:
        print(f"hvdkit run: on {host}: {error}", file=sys.stderr)
        return 1
    return sentinel.run()
