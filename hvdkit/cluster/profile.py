"""The recording of some steps, where ``HVDKIT_PROFILE`` asks for one."""

from __future__ import annotations

import os
from types import ModuleType

from hvdkit.cluster import failure
from hvdkit.cluster.exchange import ObjectExchange
from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.progress import PROGRESS
from hvdkit.profiling.settings import Settings


def asked() -> Settings | None:
    """Return what the environment asks for, or None.

    Raises:
        ValueError: the variable cannot be understood.
    """
    return Settings.told(os.environ)


def begin(settings: Settings, rank: int, host: str, exchange: ObjectExchange, horovod: ModuleType) -> None:
    """Have this rank's steps counted, and some of them recorded."""
    from hvdkit.profiling.record import Record
    from hvdkit.profiling.recorder import Recorder

    PROGRESS.profile = Recorder(settings, Record(rank, host), exchange, horovod, get_logger().warning)


def end() -> None:
    """Put together what ranks have recorded, unless this rank ends by an error: others would wait for it."""
    if PROGRESS.profile is not None and failure.exit_code() == 0:
        PROGRESS.profile.finish()
    PROGRESS.profile = None
