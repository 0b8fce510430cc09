"""Text output: whether the user sees this process on a terminal, and tables with aligned columns."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import IO


def is_terminal(stream: IO[str] | IO[bytes]) -> bool:
    """Return True if a stream is a terminal that the user sees.

    Jupyter runs the commands in cells (``!hvdkit run ...``) on a pseudo-terminal, but shows their output on a page, on
    which lines cannot be rewritten. Its kernels and their processes have the variable JPY_PARENT_PID.
    """
    return stream.isatty() and "JPY_PARENT_PID" not in os.environ


def on_terminal() -> bool:
    """Return True if the user sees this process on a terminal that can do more than print lines.

    Both stdout and stderr must be terminals: Open MPI's mpirun gives its ranks a pseudo-terminal as stdout even if its
    own output goes to a file.
    """
    return is_terminal(sys.stdout) and is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return lines with aligned columns; columns in ``right`` are right-aligned, the others left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
