"""Runs commands that may crash or hang, without leaving processes behind."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import psutil

GRACE_SECONDS = 3.0

_running: set[psutil.Popen] = set()


@dataclass(frozen=True)
class Outcome:
    """How a command ended. ``code`` is negative for a signal, None after a timeout, 127 if it could not be started."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def how(self) -> str:
        """A description of how the command ended.

        Example:
            >>> Outcome(-11, "", "", 1.0).how
            'was killed by signal 11'
        """
        if self.code is None:
            return f"did not end within {self.seconds:.0f} s"
        if self.code < 0:
            return f"was killed by signal {-self.code}"
        return f"ended with exit code {self.code}"

    def last_lines(self) -> str:
        """Return the last five non-blank lines of stderr, or of stdout if stderr is empty."""
        for text in (self.stderr, self.stdout):
            lines = [line.strip() for line in text.splitlines() if line.strip(" -*\t")]
            if lines:
                return "\n".join(lines[-5:])
        return ""


def run(argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> Outcome:
    """Run ``argv`` for at most ``timeout`` seconds; after a timeout, end all its processes.

    Output goes to files instead of pipes, because a grandchild could hold a pipe open forever.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = psutil.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env)
        except OSError as error:
            return Outcome(127, "", f"{argv[0]}: {error.strerror}", 0.0)
        _running.add(process)
        code = None
        try:
            code = process.wait(timeout)
        except psutil.TimeoutExpired:
            pass
        finally:
            seconds = time.monotonic() - started
            _running.discard(process)
            if code is None:
                end_process_tree(process)
        return Outcome(code, _text(out), _text(err), seconds)


def end_all() -> None:
    """End the commands of all :func:`run` calls in progress, which then return."""
    for process in list(_running):
        end_process_tree(process)


def end_process_tree(process: psutil.Process | psutil.Popen) -> None:
    """End a process and its descendants, which are listed first, because ranks outlive a launcher that is killed."""
    with suppress(psutil.NoSuchProcess):
        tree = [process, *process.children(recursive=True)]
        for each in tree:
            with suppress(psutil.NoSuchProcess):
                each.terminate()
        _, alive = psutil.wait_procs(tree, timeout=GRACE_SECONDS)
        for each in alive:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(alive, timeout=GRACE_SECONDS)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
