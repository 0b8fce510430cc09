"""Whole lines on standard error, also if their reader is paused."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable, Sequence

# Seconds to wait until lines are written.
_WRITE_SECONDS = 1.0


def write_all(file: int, data: bytes) -> None:
    """Write ``data`` to a descriptor, with one system call if the reader takes it all.

    Another process may have set a terminal or a pipe to non-blocking.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(file, view) :]
        except BlockingIOError:
            select.select([], [file], [], 1.0)


def write_line(text: str) -> None:
    """Write ``text`` and a line end to standard error with one system call.

    Launchers tag and forward each ``write``; a line that is written in pieces is torn apart if several ranks write at
    once. If standard error is not a file (a notebook, a test's capture), its own ``write`` is used.
    """
    data = text + "\n"
    try:
        sys.stderr.flush()
        write_all(sys.stderr.fileno(), data.encode(errors="replace"))
    except (AttributeError, OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:  # None if Python was started with file descriptor 2 closed
                sys.stderr.write(data)


class LineWriter:
    """Writes lines in a thread: if their reader is paused, the job must end nonetheless.

    Args:
        write: writes one text.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._thread: threading.Thread | None = None

    def write(self, texts: Sequence[str]) -> None:
        """Write ``texts`` after those of earlier calls; wait for it a moment, unless those are stuck."""
        before = self._thread
        is_stuck = before is not None and before.is_alive()

        def write() -> None:
            if before is not None:
                before.join()
            for text in texts:
                self._write(text)

        self._thread = threading.Thread(target=write)  # this process does not end before
        self._thread.start()
        self._thread.join(0.0 if is_stuck else _WRITE_SECONDS)

    def finish(self) -> None:
        """Wait until all lines are written."""
        if self._thread is not None:
            self._thread.join()
