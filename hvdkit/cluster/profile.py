"""Recording of some steps for a profile, if ``HVDKIT_PROFILE`` is set."""

from __future__ import annotations

from types import ModuleType

from hvdkit.cluster.exchange import ObjectExchange
from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.progress import progress
from hvdkit.profiling.settings import ProfileSettings


def begin(settings: ProfileSettings, rank: int, host: str, exchange: ObjectExchange, horovod: ModuleType) -> None:
    """Start counting this rank's steps, to record some of them."""
    from hvdkit.profiling.rank_profile import RankProfile
    from hvdkit.profiling.recorder import Recorder

    progress().profile = Recorder(settings, RankProfile(rank, host), exchange, horovod, get_logger().warning)


def end(*, finish: bool) -> None:
    """Stop recording; with ``finish``, merge the records of all ranks, all of which must call it."""
    profile, progress().profile = progress().profile, None
    if profile is not None and finish:
        profile.finish()
