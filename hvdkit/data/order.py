"""Index arithmetic: the example in each row of each rank's batch.

Pure NumPy, without communication. Names used throughout:

    n   examples in the data set          B   examples in a global batch
    N   ranks                             r   this rank
    b   real (not filler) examples of a global batch, 1 <= b <= B

An epoch's order is a permutation of ``range(n)``. Step ``i`` of the epoch takes positions ``[i*B, (i+1)*B)``, and rank
``r`` takes rows ``[r*B//N, (r+1)*B//N)`` of those. Only this last partition depends on ``N``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

Remainder = Literal["pad", "drop"]
Mode = Literal["full", "blocks"]
Order = Callable[[np.ndarray], np.ndarray]
"""Maps positions of an epoch, integers of any shape, to examples."""


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


@dataclass(frozen=True)
class RankRows:
    """The rows of each global batch that are read for one rank.

    Attributes:
        rank: r.
        size: N.
        batch_size: B.
        with_filler: True: partition B rows, padding a short batch; the number of rows is constant. False: partition
            the b real examples, with at least one row per rank.
    """

    rank: int
    size: int
    batch_size: int
    with_filler: bool = True

    def first(self, count: int | tf.Tensor) -> int | tf.Tensor:
        """Return the first row to read of a batch of ``count`` real examples, an int or an int64 scalar tensor."""
        return self.rank * (self.batch_size if self.with_filler else count) // self.size

    def rows(self, count: int) -> tuple[int, int]:
        """Return the rows to read of a batch of ``count`` real examples, as (first, one past the last).

        Example:
            >>> [RankRows(rank, 4, 10).rows(3) for rank in range(4)]
            [(0, 2), (2, 5), (5, 7), (7, 10)]
            >>> [RankRows(rank, 4, 10, with_filler=False).rows(3) for rank in range(4)]  # rank 0 has no row
            [(0, 1), (0, 1), (1, 2), (2, 3)]
        """
        partitioned = self.batch_size if self.with_filler else count
        first = self.rank * partitioned // self.size
        last = (self.rank + 1) * partitioned // self.size
        return first, max(last, first + 1)

    @property
    def max_rows(self) -> int:
        """The maximum number of rows of a batch on this rank."""
        if self.with_filler:
            first, last = self.rows(self.batch_size)
            return last - first
        return -(-self.batch_size // self.size)


def steps_per_epoch(examples: int, batch_size: int, remainder: Remainder) -> int:
    """Return the number of global batches in an epoch: n/B rounded up ("pad") or down ("drop")."""
    full, rest = divmod(examples, batch_size)
    return full + (remainder == "pad" and rest > 0)


def epoch_order(examples: int, seed: int | None, epoch: int) -> np.ndarray | None:
    """Return the order of the examples in an epoch, or None for the order of the data.

    Depends only on ``seed`` and ``epoch``. Takes 4 bytes per example (8 beyond 2**32): 400 MB for 100 million.

    Example:
        >>> epoch_order(6, seed=1, epoch=0)
        array([4, 0, 2, 1, 5, 3], dtype=uint32)
    """
    return None if seed is None else shuffled_indices(examples, (seed, epoch))


def shuffled_indices(examples: int, key: tuple[int, ...]) -> np.ndarray:
    """Return ``range(examples)`` in an order that depends only on ``key``, integers >= 0. dtype uint32 if possible."""
    order = np.arange(examples, dtype=np.uint32 if examples <= 2**32 else np.int64)
    np.random.Generator(np.random.PCG64(np.random.SeedSequence(key))).shuffle(order)
    return order


def order_check(seed: int | None) -> int | None:
    """Return a checksum of a small order, to detect a NumPy that shuffles differently.

    NumPy may change the algorithm of ``Generator.shuffle`` between releases. A run resumed with such a release would
    see some examples twice and others never; comparing this checksum detects it.
    """
    order = epoch_order(97, seed, 0)
    return None if order is None else zlib.crc32(order.astype("<u4").tobytes())


def real_rows(count: int, rows: tuple[int, int]) -> np.ndarray:
    """Return bool ``[rows]``: True for the rows that come before row ``count`` of the global batch."""
    return np.arange(*rows) < count


def sample_weights(mask: np.ndarray, count: int, size: int) -> np.ndarray:
    r"""Return the float32 weights ``[rows]`` with which the unweighted average over ranks is the global mean.

    With :math:`L_r` local rows, the weight of a real row is

    .. math:: w = N \cdot L_r / b

    and 0 for filler, because then, for any numbers of rows per rank,

    .. math:: \frac1N \sum_r \frac1{L_r} \sum_{j \in r} w_j \, loss_j = \frac1b \sum_{real\ j} loss_j .

    It is exactly 1 if N divides B and the batch is full.
    """
    return mask.astype(np.float32) * np.float32(size * len(mask) / count)
