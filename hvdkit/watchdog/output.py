"""Whole lines on standard error."""

from __future__ import annotations

import contextlib
import os
import select
import sys


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
