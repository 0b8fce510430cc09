"""Logging in whole lines, tagged with the rank.

Launchers tag and forward each ``write``: if several ranks write at once, a line written in pieces is torn apart. The
handler below writes each record, however many lines it has, with one system call.
"""

from __future__ import annotations

import functools
import logging
import os

from hvdkit.machine.launcher import launcher_tags_lines
from hvdkit.watchdog.lines import write_line

_LOGGER = logging.getLogger("hvdkit")


class WholeLineHandler(logging.Handler):
    """Writes every record to standard error with a single ``write`` call."""

    def emit(self, record: logging.LogRecord) -> None:
        """Format ``record`` and write it, bypassing buffers."""
        try:
            write_line(self.format(record))
        except Exception:
            self.handleError(record)


def get_logger() -> logging.Logger:
    """Return the logger named ``hvdkit``.

    After :func:`configure`, its lines have the form ``[rank 1] message``.
    """
    return _LOGGER


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same text before."""
    _LOGGER.warning("%s", message)


def configure(rank: int, size: int) -> None:
    """Tag log lines with the rank, unless the launcher does. The chief logs from INFO, other ranks from WARNING.

    ``HVDKIT_LOG_LEVEL`` (``DEBUG``, ``INFO``, ...) sets the level of all ranks. If the user has added handlers to the
    logger, it is not changed.
    """
    if not _LOGGER.handlers:
        handler = WholeLineHandler()
        tag = f"[rank {rank}] " if size > 1 and not launcher_tags_lines() else ""
        handler.setFormatter(logging.Formatter(f"{tag}%(message)s"))
        _LOGGER.addHandler(handler)
        _LOGGER.propagate = False
        default = "INFO" if rank == 0 else "WARNING"
        _LOGGER.setLevel(os.environ.get("HVDKIT_LOG_LEVEL", default).upper())
