"""Hash functions of an id: its bucket, and the initial values of its row.

Both must be the same on every rank, at any number of ranks, and regardless of when the id first appears, so they depend
only on the id. The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA'14).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvdkit.errors import describe
from hvdkit.sharding.initial import Constant, Distribution, resolve_initializer
from hvdkit.sharding.table import Initializer

_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment


def bucket_of(ids: tf.Tensor, buckets: int) -> tf.Tensor:
    """Return the bucket of each id, 0 to ``buckets - 1``, int64."""
    return tf.math.floormod(hash64(ids), tf.constant(buckets, tf.int64))


def hash64(x: tf.Tensor) -> tf.Tensor:
    """Return a 64-bit hash of ``x``; both are int64.

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;  z ^ (z >> 31)
    """
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def first_rows(
    initializer: Initializer, shape: tuple[int, int], dtype: str, seed: int, table: str
) -> Callable[..., tf.Tensor]:
    """Return the function from ids ``[n]`` to the initial values of their rows in ``table``, ``[n, shape[1]]``.

    Raises:
        ValueError: the initializer is neither a constant nor one of Keras's that draw each number independently.
    """
    generator = resolve_initializer(initializer, shape, dtype, seed)
    width = shape[1]
    if isinstance(generator, Constant):
        return lambda ids: tf.fill([tf.size(ids), width], tf.constant(generator.value, dtype))
    if not isinstance(generator, Distribution):
        expected = "a number, or Keras's uniform, normal, truncated normal or variance scaling"
        remedy = "rows of new ids are initialized one by one"
        raise ValueError(describe(f"initializer of table {table!r}", initializer, expected, remedy))
    table_seed = (seed * _GOLDEN + zlib.crc32(table.encode())) % 2**64
    columns = _signed(np.arange(1, width + 1, dtype=np.uint64) * np.uint64(_GOLDEN))

    def initial_rows(ids: tf.Tensor) -> tf.Tensor:
        hashes = hash64(hash64(ids ^ _signed(table_seed))[:, None] + columns)
        unit = (tf.cast(_shifted(hashes, 32), tf.float64) + 0.5) / 2.0**32
        return tf.cast(generator.from_unit(unit), dtype)

    return initial_rows


def _shifted(x: tf.Tensor, bits: int) -> tf.Tensor:
    """Shift right as an unsigned number."""
    unsigned = tf.bitcast(x, tf.uint64)
    return tf.bitcast(tf.bitwise.right_shift(unsigned, tf.constant(bits, tf.uint64)), tf.int64)


def _signed(bits: int | np.ndarray) -> tf.Tensor:
    return tf.constant(np.asarray(bits, np.uint64).view(np.int64))
