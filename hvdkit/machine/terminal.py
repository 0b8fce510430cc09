"""Text output: whether the user sees this process on a terminal, and tables with aligned columns."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import IO


def open_standard_files() -> None:
    """Replace closed standard files (``>&-``, ``2>&-``, ``<&-``) by the null device, for the rest of this process.

    Otherwise the next files and pipes that are opened would get descriptors 0 to 2, and child processes would write
    their output into them.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:  # the lowest that is free
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115


def is_terminal(stream: IO[str] | IO[bytes] | None) -> bool:
    """Return True if a stream is a terminal that the user sees; False for None, Python's stream of a closed descriptor.

    Jupyter runs the commands in cells (``!hvdkit run ...``) on a pseudo-terminal, but shows their output on a page, on
    which lines cannot be rewritten. Its kernels and their processes have the variable JPY_PARENT_PID.
    """
    return stream is not None and stream.isatty() and "JPY_PARENT_PID" not in os.environ


def can_rewrite(stream: IO[str] | IO[bytes] | None) -> bool:
    """Return True if a stream is a terminal that the user sees, and on which a line can be written again.

    ``TERM=dumb`` is a terminal that only prints lines, such as that of an editor.
    """
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def on_terminal() -> bool:
    """Return True if the user sees this process on a terminal that can do more than print lines.

    Both stdout and stderr must be terminals: Open MPI's mpirun gives its ranks a pseudo-terminal as stdout even if its
    own output goes to a file.
    """
    return can_rewrite(sys.stdout) and can_rewrite(sys.stderr)


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return lines with aligned columns; columns in ``right`` are right-aligned, the others left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def columns_of(stream: IO[bytes]) -> int:
    """Return the columns of the terminal that a stream is; if it does not know them, those of ``COLUMNS``, or 80."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:  # the terminal has been closed
        columns = 0
    return columns or shutil.get_terminal_size().columns
