"""Whole lines on standard error, and lines for a reader that may pause."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import deque
from typing import Protocol


def write_all(file: int, data: bytes) -> None:
    """Write all of ``data`` to a descriptor, with one system call if possible.

    The descriptor may be non-blocking: another process can have set that for a shared terminal or pipe.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(file, view) :]
        except BlockingIOError:
            select.select([], [file], [], 1.0)


def write_line(text: str) -> None:
    """Write ``text`` and a newline to standard error with one system call.

    Launchers tag and forward each ``write``: a line written in pieces is torn apart if several ranks write at once. If
    standard error is not a file (e.g. in a notebook, or captured by a test), its own ``write`` is used.
    """
    data = text + "\n"
    try:
        sys.stderr.flush()
        write_all(sys.stderr.fileno(), data.encode(errors="replace"))
    except (AttributeError, OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:  # None if Python was started with file descriptor 2 closed
                sys.stderr.write(data)


def flush_streams() -> None:
    """Flush standard output and error. A closed or missing stream, or a full disk, does not raise."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
            stream.flush()


class Lines(Protocol):
    """Writes lines for the user without blocking: :class:`Writer`, or the output of ``hvdkit run``."""

    def line(self, text: str) -> None:
        """Write a line after those of earlier calls."""

    def finish(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until all lines are written; return True if they are."""


class Writer:
    """Writes to a file in a thread, so that callers do not block while the file's reader pauses.

    Args:
        file: descriptor. A closed reader or a full disk does not raise.

    Attributes:
        waiting: number of bytes not written yet.
        problem: why data was lost, e.g. a full disk; None if all was written or its reader has closed the file.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._queue: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.waiting = 0
        self.problem: str | None = None

    def write(self, data: bytes) -> None:
        """Write ``data`` after that of earlier calls, with one system call if possible."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        with self._changed:
            self._queue.append(data)
            self.waiting += len(data)
            self._changed.notify_all()

    def line(self, text: str) -> None:
        """Write a line."""
        self.write(text.encode(errors="replace") + b"\n")

    def finish(self, seconds: float | None = None) -> bool:
        """Wait at most ``seconds`` until all data is written; return True if it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.waiting, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                data = self._queue.popleft()
            try:
                write_all(self._file, data)
            except BrokenPipeError:
                pass
            except OSError as error:
                self.problem = error.strerror
            with self._changed:
                self.waiting -= len(data)
                self._changed.notify_all()
