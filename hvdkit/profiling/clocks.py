"""Clock offsets between ranks, with error bounds.

Ranks on one host share a monotonic clock. Between hosts the chief assumes that a reply was sent halfway through the
round trip:

    offset = clock of the other rank - (sent + received) / 2,   wrong by at most (received - sent) / 2

The fastest of many rounds is used. Source: F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3,
1989.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from hvdkit.machine.processes import boot_id

ROUNDS = 20


class Offset(NamedTuple):
    """The offset to subtract from a rank's times, and its maximum error; nanoseconds."""

    offset: int
    error: int


def offsets(allgather: Callable[[object], list[Any]], clock: Callable[[], int] = time.monotonic_ns) -> list[Offset]:
    """Return every rank's offset from rank 0's clock. Every rank calls it; only rank 0's result is meaningful.

    Args:
        allgather: exchanges objects among all ranks.
        clock: this rank's clock, in nanoseconds.
    """
    boot_ids = allgather(boot_id())
    fastest: list[Offset] = []
    for _ in range(ROUNDS):
        sent = clock()
        allgather(None)  # a barrier: ends after rank 0 has entered it
        readings = allgather(clock())
        received = clock()
        error = (received - sent + 1) // 2
        if not fastest or error < fastest[0].error:
            fastest = [Offset(reading - (sent + received) // 2, error) for reading in readings]
    same_clock = [rank == 0 or (boot is not None and boot == boot_ids[0]) for rank, boot in enumerate(boot_ids)]
    return [Offset(0, 0) if same else offset for same, offset in zip(same_clock, fastest, strict=True)]
