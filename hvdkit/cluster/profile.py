"""The recording of some steps, where ``HVDKIT_PROFILE`` asks for one."""

from __future__ import annotations

import os
from types import ModuleType

from hvdkit.cluster.exchange import ObjectExchange
from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.progress import progress
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

    progress().profile = Recorder(settings, Record(rank, host), exchange, horovod, get_logger().warning)


def is_recorded() -> bool:
    """Return True if some steps are recorded."""
    return progress().profile is not None


def end(*, finish: bool) -> None:
    """Stop recording; with ``finish`` put together what ranks have recorded, for which all of them are needed."""
    profile, progress().profile = progress().profile, None
    if profile is not None and finish:
        profile.finish()
