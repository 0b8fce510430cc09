"""Initial values of a sharded variable: a function of the seed and the global row, independent of the number of ranks.

Random numbers come from Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11), a counter-based
generator that can start anywhere in its stream: row i starts at counter i * c, with c counters per row. A rank with
contiguous rows generates only their numbers. A rank with round-robin rows also generates the rows between them, and
discards those.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdkit.errors import describe
from hvdkit.sharding.table import Initializer

# A Philox counter yields four 64-bit words, two numbers each.
_PER_COUNTER = 8
_BLOCK_NUMBERS = 1 << 22

Numbers: TypeAlias = "np.ndarray | tf.Tensor"


def initial_blocks(
    initializer: Initializer, shape: Sequence[int], dtype: str, seed: int, index: tuple[range, ...]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the initial values of some rows, in blocks of bounded size.

    Args:
        initializer: a Keras initializer or its name, a number, or the unsharded array. Constants, RandomUniform,
            RandomNormal, TruncatedNormal and the VarianceScaling family are generated row by row; for any other
            initializer each rank generates the entire array, and keeps its part.
        shape: global shape.
        dtype: the variable's dtype.
        seed: seed of the random numbers; the same on all ranks.
        index: the requested global indices along each axis.

    Yields:
        The position of a block's first row among the requested rows, and its values.

    Raises:
        ValueError: an array has the wrong shape.
        TypeError: ``initializer`` is not an initializer.
    """
    rows, *others = index
    columns = tuple(slice(axis.start, axis.stop, axis.step) for axis in others)
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    resolved = resolve_initializer(initializer, tuple(shape), dtype, seed)
    if isinstance(resolved, np.ndarray):
        yield 0, resolved[(slice(rows.start, rows.stop, rows.step), *columns)].astype(numpy_dtype)
        return
    width = math.prod(shape[1:])
    rows_per_block = max(1, _BLOCK_NUMBERS // max(1, width * rows.step))
    for start in range(0, len(rows), rows_per_block):
        block = rows[start : start + rows_per_block]
        span = range(block[0], block[-1] + 1)
        values = resolved(seed, span, width)[:: block.step].reshape(len(block), *shape[1:])
        yield start, values[(slice(None), *columns)].astype(numpy_dtype)


def draws_numbers(initializer: Initializer) -> bool:
    """Return whether initial values may depend on a seed: not those of constants and arrays."""
    kinds = keras.initializers
    if isinstance(initializer, str):
        return initializer.lower() not in ("zeros", "ones", "constant")
    return callable(initializer) and not isinstance(initializer, kinds.Zeros | kinds.Ones | kinds.Constant)


def common_seed(seed: int | None, initializer: Initializer | None = None) -> int:
    """Return ``seed``, or the initializer's seed, or a new one. All ranks must use the chief's.

    A new one comes from Python's generator, as in Keras: ``keras.utils.set_random_seed`` makes it reproducible.
    """
    initializer_seed = getattr(initializer, "_init_seed", None)
    chosen = seed if seed is not None else initializer_seed
    if chosen is None:
        return random.getrandbits(63)
    if isinstance(chosen, bool) or not isinstance(chosen, (int, np.integer)) or chosen < 0:
        raise TypeError(describe("seed", chosen, "a whole number >= 0, or None", "pass e.g. 1"))
    return int(chosen)


@dataclass(frozen=True)
class Distribution:
    """A distribution, computed from uniform numbers between 0 and 1; works on arrays and tensors."""

    from_unit: Callable[[Numbers], Numbers]

    def __call__(self, seed: int, rows: range, width: int) -> np.ndarray:
        counters = -(-width // _PER_COUNTER)
        philox = np.random.Philox(key=seed, counter=rows.start * counters)
        bits = philox.random_raw(len(rows) * counters * _PER_COUNTER // 2).view(np.uint32)
        unit = (bits.reshape(len(rows), -1)[:, :width] + 0.5) / 2.0**32
        return self.from_unit(unit)


def resolve_initializer(
    initializer: Initializer, shape: tuple[int, ...], dtype: str, seed: int
) -> Distribution | Constant | np.ndarray:
    """Return the function that generates rows from the seed, a range of rows and their width; else the entire array."""
    if isinstance(initializer, (int, float)) and not isinstance(initializer, bool):
        return Constant(float(initializer))
    if isinstance(initializer, (np.ndarray, list, tuple, tf.Tensor)):
        return _check_shape(np.asarray(initializer), shape)
    try:
        resolved = keras.initializers.get(initializer)
    except ValueError:
        resolved = None
    kinds = keras.initializers
    if isinstance(resolved, kinds.Zeros | kinds.Ones):
        return Constant(float(isinstance(resolved, kinds.Ones)))
    if isinstance(resolved, kinds.Constant) and np.ndim(resolved.value) == 0:
        return Constant(float(resolved.value))
    if isinstance(resolved, kinds.RandomUniform):
        return _uniform(resolved.minval, resolved.maxval)
    if isinstance(resolved, kinds.RandomNormal):
        return _normal(resolved.mean, resolved.stddev)
    if isinstance(resolved, kinds.TruncatedNormal):
        return _truncated(resolved.mean, resolved.stddev)
    if isinstance(resolved, kinds.VarianceScaling):
        return _variance_scaling(resolved, shape)
    if not callable(resolved):
        remedy = "pass e.g. 'uniform', keras.initializers.RandomNormal(0.01) or an array"
        raise TypeError(describe("initializer", initializer, "a Keras initializer, its name, or values", remedy))
    with tf.init_scope():
        return _check_shape(tf.convert_to_tensor(seeded(resolved, seed)(shape, dtype=dtype)).numpy(), shape)


def seeded(initializer: keras.initializers.Initializer, seed: int) -> keras.initializers.Initializer:
    """Return the initializer with ``seed``, so that it draws the same numbers on every rank."""
    if isinstance(initializer, keras.initializers.Initializer) and "seed" in initializer.get_config():
        return type(initializer).from_config({**initializer.get_config(), "seed": seed % 2**31})
    return initializer


def _check_shape(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape:
        raise ValueError(
            describe("initializer", f"values {list(array.shape)}", f"{list(shape)}", "pass an array of this shape")
        )
    return array


@dataclass(frozen=True)
class Constant:
    """The same number everywhere."""

    value: float

    def __call__(self, seed: int, rows: range, width: int) -> np.ndarray:
        return np.broadcast_to(self.value, (len(rows), width))


def _uniform(low: float, high: float) -> Distribution:
    return Distribution(lambda unit: low + (high - low) * unit)


def _normal(mean: float, deviation: float) -> Distribution:
    return Distribution(lambda unit: mean + deviation * _inverse_normal(unit))


def _truncated(mean: float, deviation: float) -> Distribution:
    """A normal distribution truncated at two standard deviations, like Keras's."""
    below = 0.5 * math.erfc(2 / math.sqrt(2))
    return Distribution(lambda unit: mean + deviation * _inverse_normal(below + unit * (1 - 2 * below)))


def _inverse_normal(probability: Numbers) -> Numbers:
    if tf.is_tensor(probability):
        return tf.math.ndtri(probability)
    with tf.init_scope(), tf.device("CPU"):
        return tf.math.ndtri(tf.constant(probability, tf.float64)).numpy()


def _variance_scaling(initializer: keras.initializers.VarianceScaling, shape: tuple[int, ...]) -> Distribution:
    """Keras's formulas, with the fans of the global shape: stddev = sqrt(scale / n), limit = sqrt(3 scale / n)."""
    field = math.prod(shape[:-2])
    fan_in, fan_out = (shape[0], shape[0]) if len(shape) == 1 else (shape[-2] * field, shape[-1] * field)
    n = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[initializer.mode]
    scale = initializer.scale / max(1.0, n)
    if initializer.distribution == "uniform":
        limit = math.sqrt(3 * scale)
        return _uniform(-limit, limit)
    if initializer.distribution == "untruncated_normal":
        return _normal(0.0, math.sqrt(scale))
    return _truncated(0.0, math.sqrt(scale) / 0.87962566103423978)  # the stddev of the truncated distribution
