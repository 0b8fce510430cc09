"""Whether a user sees this process on a terminal."""

from __future__ import annotations

import os
import sys


def on_terminal() -> bool:
    """Return whether the user sees this process on a terminal with more capabilities than printing lines.

    Both stdout and stderr must be terminals: Open MPI's mpirun gives its ranks a pseudo-terminal as stdout even if its
    own output goes to a file.
    """
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
