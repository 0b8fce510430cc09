"""Splits of an alltoall: how many rows go to each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.collectives.conversion import as_tensor
from hvdkit.errors import describe

SPLITS = "one non-negative row count for each rank, adding up to the rows of x"


def checked_splits(splits: Any, rows: int, size: int) -> np.ndarray:
    """Return ``splits`` as an integer array. Raises ValueError if they do not match ``rows`` and ``size``."""
    if splits is None:
        if rows % size:
            raise ValueError(
                describe("x", f"{rows} rows", f"a multiple of the {size} ranks where splits is None", "pass splits")
            )
        return np.full(size, rows // size)
    counts = np.asarray(splits)
    fits = counts.shape == (size,) and counts.dtype.kind in "iu" and (counts >= 0).all() and counts.sum() == rows
    if not fits:
        expected = f"{SPLITS} ({size} ranks, {rows} rows)"
        raise ValueError(describe("splits", counts.tolist(), expected, "count the rows for each rank"))
    return counts.astype(np.int64)


def fitting_splits(splits: Any, rows: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return ``splits`` as int32, and whether they match ``rows``, as tensors evaluated when the graph runs.

    Raises:
        TypeError: ``splits`` are not integers.
    """
    counts = as_tensor(splits)
    if not counts.dtype.is_integer:
        raise TypeError(describe("splits", f"dtype {counts.dtype.name}", SPLITS, "cast it to tf.int32"))
    counts = tf.cast(counts, tf.int64)
    fits = (tf.size(counts) == size) & tf.reduce_all(counts >= 0) & (tf.reduce_sum(counts) == tf.cast(rows, tf.int64))
    return tf.cast(counts, tf.int32), fits


def even_splits(rows: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return equal splits of ``rows``, and whether the ranks divide them, as tensors evaluated when the graph runs."""
    return tf.fill([size], rows // size), rows % size == 0
