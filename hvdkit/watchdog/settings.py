"""The watchdog's settings, the same for all ranks."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from hvdkit.errors import describe
from hvdkit.watchdog.events import Welcome

HEARTBEAT = "HVDKIT_HEARTBEAT_SECONDS"
PATIENCE = "HVDKIT_WATCHDOG_SECONDS"
UNWIND = "HVDKIT_UNWIND_SECONDS"
EXIT = "HVDKIT_EXIT_SECONDS"
STALL = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
# "PORT TOKEN ADDRESS..." of `hvdkit run`, or the path of a private file that contains it: an engine may put variables
# on command lines, which every user of the host can read.
RUN_VARIABLE = "HVDKIT_RUN"
# "DESCRIPTOR INODE" of the socket to the sentinel, set for a program that `hvdkit run` started. In a program that only
# inherits the variable, the descriptor is closed or another file.
SOCKET_VARIABLE = "HVDKIT_SENTINEL"
_DEFAULTS = {HEARTBEAT: 10.0, PATIENCE: 600.0, UNWIND: 3.0, EXIT: 300.0}
_SHORTEST_HEARTBEAT = 1.0
_LONGEST_CHECK_INTERVAL = 2.0
# Reports of a sentinel per heartbeat with up to _FEW_RANKS ranks; half as many from 16 times that number on.
_REPORTS = 5
_FEW_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class WatchdogSettings:
    """The watchdog's settings.

    Attributes:
        heartbeat: seconds after which a silent sentinel or a stopped rank counts as failed; 0: never.
        patience: seconds without progress after which the job counts as hanging; 0: never.
        unwind: seconds for other ranks to exit normally after one has failed; 0: they are ended immediately.
        grace: seconds for other ranks to save after one has saved and ended with exit code 75.
    """

    heartbeat: float = _DEFAULTS[HEARTBEAT]
    patience: float = _DEFAULTS[PATIENCE]
    unwind: float = _DEFAULTS[UNWIND]
    grace: float = 2.0

    @staticmethod
    def from_environment(grace: float = 2.0) -> WatchdogSettings:
        """Return the settings from the environment. Raises ValueError if one is invalid."""
        heartbeat = seconds(HEARTBEAT)
        return WatchdogSettings(
            heartbeat=max(_SHORTEST_HEARTBEAT, heartbeat) if heartbeat else 0.0,
            patience=seconds(PATIENCE) if heartbeat else 0.0,
            unwind=seconds(UNWIND),
            grace=grace,
        )

    def interval(self, size: int) -> float:
        """Return the seconds between a sentinel's reports: a fifth of the heartbeat, up to two fifths in large jobs.

        Example:
            >>> [WatchdogSettings().interval(size) for size in (4, 256, 4096)]
            [2.0, 3.0, 4.0]
        """
        doublings = math.log2(max(size, _FEW_RANKS) / _FEW_RANKS)
        return (self.heartbeat or _DEFAULTS[HEARTBEAT]) / _REPORTS * min(2.0, 1 + doublings / 4)

    @property
    def check_interval(self) -> float:
        """Seconds between a rank's checks of its sentinel, so that a stopped one is resumed well within the heartbeat.

        Example:
            >>> WatchdogSettings().check_interval, WatchdogSettings(heartbeat=2.0).check_interval
            (2.0, 0.5)
        """
        return min(_LONGEST_CHECK_INTERVAL, self.heartbeat / 4) if self.heartbeat else _LONGEST_CHECK_INTERVAL

    def welcome(self, size: int, *, measures: bool = False) -> Welcome:
        """Return the answer to a sentinel that joins; with ``measures``, it sends measurements as well."""
        return Welcome(heartbeat=self.heartbeat, interval=self.interval(size), measures=measures)


def seconds(name: str) -> float:
    """Return the setting ``name`` from the environment; 0 disables it. Raises ValueError for anything but seconds."""
    text = os.environ.get(name)
    if text is None and name == PATIENCE:
        text = os.environ.get(STALL)
    try:
        value = _DEFAULTS[name] if not text else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(describe(name, text or "", "a number of seconds, 0 for never", f"e.g. {name}=60"))
    return value
