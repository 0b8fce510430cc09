"""The process of an engine: its start, its output and its end."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from hvdkit.commands.run.engines import CommandLine
from hvdkit.commands.run.output import LONGEST_LINE, OutputWriter
from hvdkit.machine import processes

# Maximum seconds between SIGTERM and SIGKILL to the engine.
KILL_SECONDS = 4.0


class EngineProcess:
    """A running engine.

    Args:
        name: the engine's name, a prefix of its lines.
        environment: its environment, in addition to that of ``line``.
        selector: waits for its standard output and error, with the channel (1 or 2) as data.

    Attributes:
        was_ended: True once :meth:`tick` has sent it a signal; its exit code is then unrelated to the job.
        last_line: the last line of its output that is not a ruler.
        last_report: the last line of its standard output, on which the engine of Ray writes which actor has died.

    Raises:
        ValueError: the engine cannot be started.
    """

    def __init__(
        self,
        name: str,
        line: CommandLine,
        environment: Mapping[str, str],
        selector: selectors.BaseSelector,
        output: OutputWriter,
    ) -> None:
        self._name = name
        self._selector = selector
        self._output = output
        self.was_ended = False
        self.last_line = ""
        self.last_report = ""
        self._temporary = Path(environment.get("TMPDIR") or "/tmp")
        self._deadlines: list[tuple[float, signal.Signals]] = []
        self._partial = {1: b"", 2: b""}
        self._held = b""
        try:
            self._process = subprocess.Popen(
                line.argv,
                env={**environment, **line.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C reaches only hvdkit run
                preexec_fn=lambda: processes.signal_at_parent_end(signal.SIGTERM),
            )
        except OSError as error:
            raise ValueError(f"--engine {name}: {line.argv[0]} cannot start ({error.strerror})") from error
        assert self._process.stdout and self._process.stderr
        for channel, file in ((1, self._process.stdout), (2, self._process.stderr)):
            os.set_blocking(file.fileno(), False)
            selector.register(file, selectors.EVENT_READ, channel)

    @property
    def code(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    @property
    def is_ending(self) -> bool:
        """True if :meth:`end` was called, and a signal is still to be sent."""
        return bool(self._deadlines)

    def end(self, seconds: float) -> None:
        """End the engine if it still runs after ``seconds``."""
        at = time.monotonic() + seconds
        if not self._deadlines or at < self._deadlines[0][0]:
            self._deadlines = [(at, signal.SIGTERM), (at + min(2 * seconds, KILL_SECONDS), signal.SIGKILL)]

    def tick(self, now: float) -> None:
        """Send the signals that are due."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = self._deadlines.pop(0)
            if self.code is None:
                self.was_ended = True
                self._process.send_signal(number)

    def read(self, key: selectors.SelectorKey, hold: bool) -> None:
        """Read one of its channels; write complete lines, or hold them back if ``hold``."""
        try:
            data = os.read(key.fd, 1 << 16)
        except OSError:
            return
        if not data:
            self._selector.unregister(key.fileobj)
            return
        *lines, rest = (self._partial[key.data] + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines = [*lines, rest]
            rest = b""
        self._partial[key.data] = rest
        self._write(key.data, lines, hold)

    def flush(self, hold: bool) -> None:
        """Write the remaining incomplete lines."""
        for channel, rest in self._partial.items():
            self._write(channel, [rest] if rest else [], hold)

    def write_held(self) -> None:
        """Write the lines that were held back."""
        self._output.write(2, self._held)

    def remove_files(self) -> None:
        """Remove the folder of Open MPI's mpirun, of 8 MiB or more, if it was killed before it could do so.

        Called after its end. TMPDIR may be shared with other hosts, so the folder's name must be that of this host.
        Source: ``orte_session_dir`` of Open MPI 4.
        """
        host = socket.gethostname()
        for name in {host, host.partition(".")[0]}:
            folder = self._temporary / f"ompi.{name}.{os.getuid()}" / f"pid.{self._process.pid}"
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # other jobs have folders there
                folder.parent.rmdir()

    def _write(self, channel: int, lines: list[bytes], hold: bool) -> None:
        if not lines:
            return
        for line in lines:
            if line.strip(b" -*"):
                self.last_line = line.decode(errors="replace").strip()
                self.last_report = self.last_line if channel == 1 else self.last_report
        data = b"".join(b"[%b] %b\n" % (self._name.encode(), line) for line in lines)
        if hold:
            self._held += data
        else:
            self._output.write(channel, data)
