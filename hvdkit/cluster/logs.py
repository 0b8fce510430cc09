"""Rank-tagged logging in whole lines.

Launchers tag and forward each ``write``; a line that is written in pieces is torn apart when several ranks
speak at once. The handler below writes each record, however many lines it has, with one system call.
"""

from __future__ import annotations

import logging
import os

from hvdkit.machine.launcher import launcher_tags_lines
from hvdkit.watchdog.output import write_line

_LOGGER = logging.getLogger("hvdkit")


class WholeLines(logging.Handler):
    """Write every record to standard error with a single ``write`` call."""

    def emit(self, record: logging.LogRecord) -> None:
        """Format ``record`` and write it at once, past any buffer."""
        try:
            write_line(self.format(record))
        except Exception:
            self.handleError(record)


def get_logger() -> logging.Logger:
    """Return the logger named ``hvdkit``.

    Once :func:`configure` ran, its lines look like ``[rank 1] message``.
    """
    return _LOGGER


def configure(rank: int, size: int) -> None:
    """Tag log lines with the rank unless the launcher does; ranks other than the chief show warnings and worse only.

    The level can be set by ``HVDKIT_LOG_LEVEL`` (``DEBUG``, ``INFO``, ...), then for all ranks alike.
    A logger that the person gave handlers of their own is left alone.
    """
    if not _LOGGER.handlers:
        handler = WholeLines()
        tag = f"[rank {rank}] " if size > 1 and not launcher_tags_lines() else ""
        handler.setFormatter(logging.Formatter(f"{tag}%(message)s"))
        _LOGGER.addHandler(handler)
        _LOGGER.propagate = False
        default = "INFO" if rank == 0 else "WARNING"
        _LOGGER.setLevel(os.environ.get("HVDKIT_LOG_LEVEL", default).upper())
