"""Batches from any iterable, the same number on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.cluster.logs import get_logger

# Batches that a rank holds ready before the ranks compare how many each has: one small exchange for so many steps.
WINDOW = 8


def lockstep(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield this rank's batches for as long as every rank has one. Every rank iterates.

    A rank whose data end first would leave the others waiting in their next collective. The batches that others
    have left then are not used; the chief says so. ``hk.data.GlobalBatches`` needs none of this: it gives every
    rank the same number, and uses every example.

    Example::

        for batch in lockstep(my_dataset):
            train_step(batch)
    """
    source = iter(batches)
    exchange = cluster.exchange()
    ready: list[Any] = []

    def read() -> int:
        ready[:] = itertools.islice(source, WINDOW)
        return len(ready)

    while True:
        counts = gather(exchange, "the number of batches", read)
        yield from ready[: min(counts)]
        if min(counts) < WINDOW:
            break
    if min(counts) < max(counts) and cluster.is_chief():
        get_logger().warning(
            "data: rank %d had no batch left while others had up to %d more, which are not used; give every rank "
            "as many, or use hk.data.GlobalBatches",
            counts.index(min(counts)),
            max(counts) - min(counts),
        )
