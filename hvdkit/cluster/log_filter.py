"""A filter from standard input to standard output that drops TensorFlow's startup messages.

It runs as a script, in an isolated interpreter with the standard library only, while TensorFlow is imported:

    python -IS .../hvdkit/cluster/log_filter.py
"""

from __future__ import annotations

import os
import signal
import sys

# The beginnings of lines that are irrelevant to the job: absl's preamble, and notes of TensorFlow's libraries.
CHATTER = (
    "WARNING: All log messages before absl::InitializeLog()",
    "I0000 ",
    "To enable the following instr",
)


def main() -> None:
    """Copy all other lines, one at a time, until the last writer has closed the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the writing process, and the pipe with it
    prefixes = tuple(prefix.encode() for prefix in CHATTER)
    for line in sys.stdin.buffer:
        if not line.startswith(prefixes):
            os.write(1, line)


if __name__ == "__main__":
    main()
