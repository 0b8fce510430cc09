"""The wrapper around one rank: starts the program, sends its output and its end to ``hvdkit run``, leaves no orphan.

It runs by its path, in an isolated interpreter and on the standard library alone, so that four of them cost next to
nothing to start: ``import hvdkit`` in a process that a launcher started would load TensorFlow.

    python -IS .../hvdkit/launch/rank.py

Frames on the connection are a byte of kind, four of length, and the payload. Both ends prove that they know the job's
token, without sending it, before anything else is said: the wrapper sends a nonce (HELLO), ``hvdkit run`` its own nonce
and a proof (CHALLENGE), the wrapper its proof and its place (HELLO), ``hvdkit run`` the program (HELLO). From then on
``hvdkit run`` sends single bytes: the number of a signal for the program, or LEAVE.

A rank that uses hvdkit hands the report of a failure to its wrapper by a pipe, and the wrapper sends it on (REPORT):
output is never searched for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import hmac
import io
import json
import os
import secrets
import select
import selectors
import signal
import socket
import stat
import struct
import sys
import termios
import time

# Kinds of frames; those of outputs are their file descriptors.
STDOUT, STDERR, HELLO, END, CHALLENGE, REPORT, LEAVE = 1, 2, 3, 4, 5, 6, 0
HEADER = struct.Struct("!BI")
# How `hvdkit run` is found: "PORT TOKEN ADDRESS..." in the variable, or in the file that the variable names. The file
# is for an engine that writes values of variables on command lines, which every user of the host can read.
VARIABLE = "HVDKIT_RUN"
SIGNALS_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
# From these variables `hvdkit run` reads which rank this is.
PLACE = ("OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "HOROVOD_", "SLURM_", "PMIX_RANK")
# A host that has not acknowledged anything for so long is cut off: just before the watchdog's limit, if that is longer.
_LIMIT = os.environ.get("HVDKIT_HEARTBEAT_SECONDS", "").partition(".")[0]
# `hvdkit run` may have thousands of other ranks to answer.
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0
SILENT_SECONDS = min(max(9, int(_LIMIT) - 1), 86_400) if _LIMIT.isdigit() else 9
# So long the program has once `hvdkit run` is gone; and its children, which hold its pipes, after it.
ORPHAN_SECONDS, DRAIN_SECONDS = 5.0, 0.3
_LONGEST_CHALLENGE, _LONGEST_REPORT = 4096, 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


class Lost(Exception):
    """The connection to ``hvdkit run`` has ended."""


def proof(token: str, role: str, *nonces: str) -> str:
    """Return what only an end of the connection that knows the token can say, for these nonces alone."""
    return hmac.new(token.encode(), " ".join([role, *nonces]).encode(), hashlib.sha256).hexdigest()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """In a child: get a signal when the parent ends, however that ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def keep_alive(connection: socket.socket) -> None:
    """Notice within :data:`SILENT_SECONDS` that the other host has gone, while nothing is being sent to it."""
    # TCP_USER_TIMEOUT would also end a connection whose reader merely pauses, as a stopped terminal does.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_SECONDS // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def _read(path: str) -> str:
    with io.FileIO(path) as file:
        return file.readall().decode()


def descendants(pid: int) -> list[int]:
    """Return the process ids of all children of ``pid``, and theirs."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            for child in map(int, _read(f"{task.path}/children").split()):
                found += [child, *descendants(child)]
    return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def end_descendants() -> None:
    """Kill every process below this one, and those that come to light when their parents are gone."""
    until = time.monotonic() + 2.0
    while (found := descendants(os.getpid())) and time.monotonic() < until:
        _kill(found)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


class Connection:
    """The way to ``hvdkit run``."""

    def __init__(self, told: str) -> None:
        port, self.token, *addresses = told.split()
        problem: Exception | None = None
        for address in addresses:
            try:
                self.socket = socket.create_connection((address, int(port)), CONNECT_SECONDS)
            except OSError as error:
                problem = error
                continue
            try:
                keep_alive(self.socket)
                self.socket.settimeout(ANSWER_SECONDS)
                self._authenticate()
                return
            except (OSError, Lost) as error:  # an address such as a bridge's own may lead to another machine
                self.socket.close()
                problem = error
        where = f"{', '.join(addresses)} port {port}"
        raise OSError(f"hvdkit run cannot be reached at {where} ({problem}); name another --interface")

    def _authenticate(self) -> None:
        """Have the other end prove that it knows the token, and prepare the proof of this one."""
        mine = secrets.token_hex(16)
        self.send(HELLO, json.dumps({"nonce": mine}).encode())
        try:
            answer = json.loads(self._receive_frame(_LONGEST_CHALLENGE))
            theirs, shown = str(answer["nonce"]), str(answer["proof"])
        except (ValueError, KeyError, TypeError, RecursionError):
            theirs = shown = ""
        if not hmac.compare_digest(shown.encode(errors="replace"), proof(self.token, "run", mine, theirs).encode()):
            raise Lost("what listens there does not know the token of this job")
        self.proof = proof(self.token, "rank", mine, theirs)

    def send(self, kind: int, payload: bytes) -> None:
        data = memoryview(HEADER.pack(kind, len(payload)) + payload)
        try:
            while data:
                if select.select([], [self.socket], [], 0.5)[1]:
                    with contextlib.suppress(BlockingIOError):
                        data = data[self.socket.send(data, socket.MSG_DONTWAIT) :]
                elif self.is_silent():
                    raise Lost
        except OSError as error:
            raise Lost from error

    def is_silent(self) -> bool:
        """Say whether something was sent and nothing has been acknowledged for :data:`SILENT_SECONDS`.

        No keep-alives are sent then. To a reader that pauses nothing is on its way. Source: linux/tcp.h, tcp_info.
        """
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        on_its_way, milliseconds = struct.unpack_from("I", info, 24)[0], struct.unpack_from("I", info, 56)[0]
        return on_its_way > 0 and milliseconds > SILENT_SECONDS * 1000

    def greet(self, host: str) -> dict:
        """Say who this is; return the settings that come back."""
        place = {name: value for name, value in os.environ.items() if name.startswith(PLACE)}
        self.send(HELLO, json.dumps({"proof": self.proof, "host": host, "place": place}).encode())
        self.socket.settimeout(None)
        try:
            return json.loads(self._receive_frame())
        except Lost:
            words = "hvdkit run refused this rank: the engine has not set its rank number; is it of another MPI?"
            raise Lost(words) from None

    def _receive_frame(self, longest: int | None = None) -> bytes:
        length = HEADER.unpack(self._receive(HEADER.size))[1]
        if longest is not None and length > longest:
            raise Lost("what listens there is not hvdkit run")
        return self._receive(length)

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise Lost("what listens there has closed the connection")
            data += part
        return data


class Program:
    """The program of this rank: its process, and where its output is read."""

    def __init__(self, command: list[bytes], environment: dict[str, str], terminal: dict | None, report: str) -> None:
        self.signals: list[int] = []  # that came to this wrapper by others than hvdkit run
        self.status: int | None = None
        self.stopped_at: float | None = None
        outputs = [_pipe(terminal), _pipe(terminal)]
        reader, writer = os.pipe()
        self.files = {outputs[0][0]: STDOUT, outputs[1][0]: STDERR, reader: REPORT}
        environment = {**environment, report: f"{writer} {os.fstat(writer).st_ino}"}
        me = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent()
                if os.getppid() != me:
                    os._exit(137)
                os.dup2(outputs[0][1], 1)
                os.dup2(outputs[1][1], 2)
                os.set_inheritable(writer, True)
                for number in (*SIGNALS_PASSED_ON, signal.SIGCHLD, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                os.execvpe(command[0], command, environment)
            except OSError as error:
                os.write(2, b"hvdkit run: %b: %b\n" % (command[0], str(error.strerror).encode()))
                os._exit(127 if isinstance(error, FileNotFoundError) else 126)
            finally:
                os._exit(126)
        for file in (outputs[0][1], outputs[1][1], writer):
            os.close(file)

    def kill(self, number: int) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def reap(self) -> None:
        """Collect ended children, the program's orphans among them."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if not pid:
                    return
                if pid == self.pid and (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                    self.stopped_at = time.monotonic() if os.WIFSTOPPED(status) else None
                elif pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)


def _pipe(terminal: dict | None) -> tuple[int, int]:
    """Return reader and writer of a pipe, or of a terminal as wide as the one that shows it, for progress bars."""
    if terminal is None:
        reader, writer = os.pipe()
    else:
        reader, writer = os.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", terminal["lines"], terminal["columns"], 0, 0))
        modes = termios.tcgetattr(writer)
        modes[1] &= ~termios.OPOST  # line ends stay as they were written
        termios.tcsetattr(writer, termios.TCSANOW, modes)
    os.set_inheritable(writer, False)
    return reader, writer


class Wrapper:
    """One rank from its start to its end."""

    def __init__(self, connection: Connection, program: Program, wakeup: int, stopped_seconds: float) -> None:
        self.connection, self.program, self.wakeup = connection, program, wakeup
        self.stopped_seconds = stopped_seconds
        self.lost = self.leave = False
        self.deadline: float | None = None
        self.report = b""
        self.selector = selectors.DefaultSelector()
        for file in (*program.files, wakeup, connection.socket.fileno()):
            self.selector.register(file, selectors.EVENT_READ)

    def run(self) -> int:
        """Serve until the program has ended; return its exit code as a shell would."""
        now = time.monotonic()
        while self.program.status is None:
            self._turn(0.5)
            before, now = now, time.monotonic()
            if self.program.stopped_at is not None and now - before > 2.0:  # this process was stopped, too
                self.program.stopped_at = now
            stopped = self.program.stopped_at is not None and now - self.program.stopped_at > self.stopped_seconds
            if stopped or (self.deadline is not None and now > self.deadline):
                self.program.kill(signal.SIGKILL)
        until = time.monotonic() + DRAIN_SECONDS
        while self.program.files and time.monotonic() < until:
            self._turn(0.05)
        end_descendants()
        code = self.program.status
        end = {"code": code, "signals": self.program.signals, "stopped": self.program.stopped_at is not None}
        self._send(END, json.dumps(end).encode())
        # While this process lives, the engine knows of no failure, and lets other ranks save.
        while not (self.lost or self.leave):
            self._turn(0.5)
        return code if code >= 0 else 128 - code

    def _turn(self, seconds: float) -> None:
        ready = self.selector.select(seconds)
        if not ready and not self.lost and self.connection.is_silent():
            self._orphaned()
        for key, _ in ready:
            file = key.fd
            if file == self.wakeup:
                self._signalled(os.read(file, 64))
            elif file in self.program.files:
                self._forward(file)
            elif not self.lost:
                self._obey()

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGCHLD:
                self.program.signals.append(number)
                self.program.kill(number)
        self.program.reap()

    def _forward(self, file: int) -> None:
        try:
            data = os.read(file, 65536)
        except OSError:  # a terminal whose writers are gone
            data = b""
        kind = self.program.files[file]
        if data and kind == REPORT:
            *reports, self.report = (self.report + data[:_LONGEST_REPORT]).split(b"\n")
            self.report = self.report[:_LONGEST_REPORT]
            for one in reports:
                self._send(REPORT, one)
            return
        if data:
            self._send(kind, data)
            return
        self.selector.unregister(file)
        del self.program.files[file]

    def _send(self, kind: int, payload: bytes) -> None:
        try:
            if not self.lost:
                self.connection.send(kind, payload)
        except Lost:
            self._orphaned()

    def _obey(self) -> None:
        try:
            orders = self.connection.socket.recv(64)
        except OSError:
            orders = b""
        if not orders:
            self._orphaned()
        for order in orders:
            if order == LEAVE:
                self.leave = True
            else:
                self.program.kill(order)
                if order == signal.SIGKILL:
                    _kill(descendants(self.program.pid))
        self.program.reap()

    def _orphaned(self) -> None:
        """``hvdkit run`` is gone, or out of reach: nobody would ever end this rank."""
        self.lost = True
        self.selector.unregister(self.connection.socket.fileno())
        self.program.kill(signal.SIGCONT)
        self.program.kill(signal.SIGTERM)
        self.deadline = time.monotonic() + ORPHAN_SECONDS


def _catch_signals() -> int:
    """Return a file in which the number of every signal appears."""
    reader, writer = os.pipe()
    for file in (reader, writer):
        os.set_blocking(file, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (*SIGNALS_PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: None)
    return reader


def told() -> str:
    """Return what the variable, or the file that it names, says of ``hvdkit run``."""
    text = os.environ[VARIABLE]
    return read_private(text) if text.startswith("/") else text


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
        return os.read(file, _LONGEST_CHALLENGE).decode()
    finally:
        os.close(file)


def main() -> int:
    """Run the program that ``hvdkit run`` names; return its exit code."""
    host = socket.gethostname()
    adopt_orphans()
    wakeup = _catch_signals()
    try:
        connection = Connection(told())
        settings = connection.greet(host)
    except (OSError, Lost) as error:
        print(f"hvdkit run: on {host}: {error}", file=sys.stderr)
        return 1
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | settings["environment"]
    command = [word.encode("latin-1") for word in settings["command"]]  # bytes, in JSON
    program = Program(command, environment, settings["terminal"], settings["report"])
    return Wrapper(connection, program, wakeup, settings["stopped_seconds"]).run()


if __name__ == "__main__":
    sys.exit(main())
