"""Collect all ranks' profiles on the chief, in one clock.

Ranks on one host share a monotonic clock. Between hosts the chief assumes that a reply was sent halfway through the
round trip:

    offset = clock of the other rank - (sent + received) / 2,   wrong by at most (received - sent) / 2

The fastest of many rounds is used. Source: F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3,
1989.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from hvdkit.machine.processes import boot_id
from hvdkit.profiling.rank_profile import RankProfile

T = TypeVar("T")
# Limit on the spans of all ranks together, because every rank receives all of them.
_MAX_SPANS = 600_000
_CLOCK_ROUNDS = 20


class ClockOffset(NamedTuple):
    """The offset to subtract from a rank's times, and its maximum error; nanoseconds."""

    offset: int
    error: int


class Exchange(Protocol):
    """Exchanges objects among all ranks, like ``hvdkit.cluster.exchange.ObjectExchange``."""

    def allgather(self, value: T) -> list[T]:
        """Return every rank's ``value``, in rank order."""

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, in rank order."""

    def broadcast(self, value: T, root: int) -> T:
        """Return the ``value`` of ``root``."""


def collect_profiles(
    folder: Path, profile: RankProfile, xplane: bytes, exchange: Exchange, log: Callable[[str], None]
) -> list[RankProfile]:
    """Return all ranks' profiles on the chief, in its clock; an empty list on other ranks. Every rank calls it.

    ``xplane``, the output of TensorFlow's profiler on this rank, is written to ``plugins/profile/``, for TensorBoard.
    """
    ranks = len(exchange.allgather(None))
    offsets = clock_offsets(exchange.allgather)
    for problem in profile.problems:
        log(f"profile: {problem}")
    profile.drop_short_ops(_MAX_SPANS // ranks)
    compressed = exchange.allgather_bytes(zlib.compress(json.dumps(vars(profile)).encode(), 1))
    _write_xplane(folder, profile, xplane, exchange)
    if profile.rank:
        return []
    return [
        RankProfile.from_json(json.loads(zlib.decompress(data))).shifted(*offset)
        for data, offset in zip(compressed, offsets, strict=True)
    ]


def clock_offsets(
    allgather: Callable[[object], list[Any]], clock: Callable[[], int] = time.monotonic_ns
) -> list[ClockOffset]:
    """Return every rank's offset from rank 0's clock. Every rank calls it; only rank 0's result is meaningful."""
    boot_ids = allgather(boot_id())
    fastest: list[ClockOffset] = []
    for _ in range(_CLOCK_ROUNDS):
        sent = clock()
        allgather(None)  # a barrier: ends after rank 0 has entered it
        readings = allgather(clock())
        received = clock()
        error = (received - sent + 1) // 2
        if not fastest or error < fastest[0].error:
            fastest = [ClockOffset(reading - (sent + received) // 2, error) for reading in readings]
    same_clock = [rank == 0 or (boot is not None and boot == boot_ids[0]) for rank, boot in enumerate(boot_ids)]
    return [ClockOffset(0, 0) if same else offset for same, offset in zip(same_clock, fastest, strict=True)]


def _write_xplane(folder: Path, profile: RankProfile, xplane: bytes, exchange: Exchange) -> None:
    """Write TensorFlow's files in TensorBoard's layout: one run, with each rank as a host."""
    run = exchange.broadcast(time.strftime("%Y_%m_%d_%H_%M_%S"), 0)
    file = folder / "plugins" / "profile" / run / f"{profile.host}.rank-{profile.rank}.xplane.pb"
    try:
        if xplane:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(xplane)
    except OSError as error:
        profile.problems.append(f"{file} cannot be written ({error.strerror})")
    files = {rank: path for rank, path in enumerate(exchange.allgather(str(file) if xplane else None)) if path}
    missing = exchange.broadcast([rank for rank, path in files.items() if not Path(path).exists()], 0)
    if missing:  # their hosts do not share a file system with the chief's
        contents = exchange.allgather_bytes(xplane if profile.rank in missing else b"")
        if profile.rank == 0:
            with contextlib.suppress(OSError):  # optional: the trace does not need them
                for rank in missing:
                    Path(files[rank]).parent.mkdir(parents=True, exist_ok=True)
                    Path(files[rank]).write_bytes(contents[rank])
