"""Text output: whether the user sees this process on a terminal, and tables with aligned columns."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def on_terminal() -> bool:
    """Return True if the user sees this process on a terminal that can do more than print lines.

    Both stdout and stderr must be terminals: Open MPI's mpirun gives its ranks a pseudo-terminal as stdout even if its
    own output goes to a file.
    """
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return lines with aligned columns; columns in ``right`` are right-aligned, the others left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
