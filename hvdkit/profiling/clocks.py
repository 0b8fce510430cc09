"""Clock offsets between ranks, with error bounds.

Ranks on one host share a monotonic clock. Between hosts the chief assumes that a reply was sent halfway through the
round trip:

    offset = clock of the other rank - (asked + answered) / 2,   wrong by at most (answered - asked) / 2

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


def offsets(allgather: Callable[[Any], list[Any]], clock: Callable[[], int] = time.monotonic_ns) -> list[Offset]:
    """Return every rank's offset from rank 0's clock. Every rank calls it; only rank 0's result is meaningful.

    Args:
        allgather: exchanges objects among all ranks.
        clock: this rank's clock, in nanoseconds.
    """
    machines = allgather(boot_id())
    best: list[Offset | None] = [None] * len(machines)
    for _ in range(ROUNDS):
        asked = clock()
        allgather(None)  # a barrier: ends after rank 0 has entered it
        told = allgather(clock())
        answered = clock()
        for rank, value in enumerate(told):
            found = Offset(value - (asked + answered) // 2, (answered - asked + 1) // 2)
            known = best[rank]
            if known is None or found.error < known.error:
                best[rank] = found
    same = [place is not None and place == machines[0] for place in machines]
    same[0] = True
    return [Offset(0, 0) if one else found or Offset(0, 0) for one, found in zip(same, best, strict=True)]
