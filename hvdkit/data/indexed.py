"""Sources with random access: the examples in each batch, computed from its epoch and step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np

from hvdkit.data import order

T = TypeVar("T")
Mode = Literal["full", "blocks"]


@dataclass(frozen=True)
class Shuffle:
    """How the examples of an epoch are ordered.

    Attributes:
        seed: None keeps the order of the data.
        mode: "full": a permutation of all examples. "blocks": as :mod:`hvdkit.data.block_order` describes.
        buffer: Examples in the windows of all lanes, or in the buffer of a stream.
        lanes: L, for "blocks".
    """

    seed: int | None
    mode: Mode = "full"
    buffer: int | None = None
    lanes: int | None = None


class IndexedSource(Protocol):
    """A source with random access.

    Attributes:
        examples: The number of examples.
    """

    examples: int

    def order(self, shuffle: Shuffle, epoch: int, batch_size: int) -> order.Order | None:
        """Return the order of an epoch, or None for the order of the data."""


def batches_of_epoch(
    source: IndexedSource,
    epoch: int,
    step: int,
    rank_rows: order.RankRows,
    shuffle: Shuffle,
    remainder: order.Remainder,
    read: Callable[[np.ndarray], T],
    max_batches: int = 1,
) -> Iterator[tuple[T, list[int], int]]:
    """Yield ``read(indices)`` for the rank's rows of the epoch's global batches from ``step`` on.

    ``indices`` are int64 ``[rows]``. If ``max_batches`` is larger than 1, they are of up to that many batches with
    equal numbers of rows, ``[batches, rows]``. The second value has the number of real examples of each batch. The
    third is 0; streams yield a digest of the batch instead.
    """
    examples = source.examples
    batch_size = rank_rows.batch_size
    steps = order.steps_per_epoch(examples, batch_size, remainder)
    epoch_order = source.order(shuffle, epoch, batch_size)
    rows_of_full_batch = rank_rows.rows(batch_size)
    while step < steps:
        counts = [order.real_examples(step, examples, batch_size)]
        rows = rows_of_full_batch if counts[0] == batch_size else rank_rows.rows(counts[0])
        indices = order.row_indices(step, examples, batch_size, rows, epoch_order)
        if max_batches > 1:
            following = range(step + 1, min(step + max_batches, steps))
            full = [i for i in following if order.real_examples(i, examples, batch_size) == counts[0]]
            counts += counts * len(full)  # a short last batch is yielded separately
            others = [order.row_indices(i, examples, batch_size, rows, epoch_order) for i in full]
            indices = np.stack([indices, *others])
        yield read(indices), counts, 0
        step += len(counts)
