"""Iterate over batches of any iterable, with the same number on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

from hvdkit import cluster
from hvdkit.cluster.agreement import run_and_describe
from hvdkit.cluster.logs import get_logger

T = TypeVar("T")
# Batches that a rank reads ahead between comparisons of the number available: one small exchange per WINDOW steps.
WINDOW = 8


def lockstep(batches: Iterable[T]) -> Iterator[T]:
    """Yield this rank's batches as long as every rank has one. Every rank must iterate.

    Otherwise, ranks with more data would wait in their next collective for a rank whose data have ended. Their
    remaining batches are dropped, and the chief logs a warning. ``hk.data.GlobalBatches`` doesn't need this: it gives
    all ranks the same number of batches and uses every example.
    """
    source = iter(batches)
    exchange = cluster.exchange()
    while True:
        ready, counts = run_and_describe(
            exchange, "the number of batches", lambda: list(itertools.islice(source, WINDOW)), len
        )
        yield from ready[: min(counts)]
        if min(counts) < WINDOW:
            break
    if min(counts) < max(counts) and cluster.is_chief():
        get_logger().warning(
            "data: rank %d had no batch left while others had up to %d more, which are dropped; give every rank "
            "the same number of batches, or use hk.data.GlobalBatches",
            counts.index(min(counts)),
            max(counts) - min(counts),
        )
