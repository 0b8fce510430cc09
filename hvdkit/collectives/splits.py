"""How many rows go to each rank in an alltoall."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.collectives.values import as_tensor
from hvdkit.errors import describe

_SPLITS = "one non-negative row count for each rank, adding up to the rows of x"


def checked_splits(splits: Any, rows: int, size: int) -> np.ndarray:
    """Return ``splits`` as an integer array, or raise ValueError where it does not fit ``rows`` and ``size``."""
    if splits is None:
        if rows % size:
            raise ValueError(
                describe("x", f"{rows} rows", f"a multiple of the {size} ranks where splits is None", "pass splits")
            )
        return np.full(size, rows // size)
    counts = np.asarray(splits)
    fits = counts.shape == (size,) and counts.dtype.kind in "iu" and (counts >= 0).all() and counts.sum() == rows
    if not fits:
        expected = f"{_SPLITS} ({size} ranks, {rows} rows)"
        raise ValueError(describe("splits", counts.tolist(), expected, "count the rows for each rank"))
    return counts.astype(np.int64)


def fitting_splits(splits: Any, rows: tf.Tensor, size: int) -> tf.Tensor:
    """Return ``splits`` as int32, checked when the graph runs: Horovod would drop the rows beyond their sum."""
    counts = tf.cast(as_tensor(splits), tf.int32)
    fits = (tf.size(counts) == size) & tf.reduce_all(counts >= 0) & (tf.reduce_sum(counts) == rows)
    with tf.control_dependencies([tf.debugging.Assert(fits, [f"splits: expected {_SPLITS}; got", counts, rows])]):
        return tf.identity(counts)


def even_splits(rows: tf.Tensor, size: int) -> tf.Tensor:
    """Return equal splits of ``rows``, which are checked when the graph runs to be a multiple of the ranks."""
    check = tf.debugging.assert_equal(rows % size, 0, "x: rows must be a multiple of the ranks; pass splits")
    with tf.control_dependencies([check] if check is not None else []):
        return tf.fill([size], rows // size)
