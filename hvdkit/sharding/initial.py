"""Initial values of a sharded variable: a function of the seed and the global row, independent of the number of ranks.

Random numbers come from Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11), a counter-based
generator that can start anywhere in its stream: row i starts at counter i * c, with c counters per row. With contiguous
rows a rank generates only its own numbers. With round-robin rows, it generates the rows between them as well, and
discards those.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit.errors import describe

# A Philox counter yields four 64-bit words, two numbers each.
_PER_COUNTER = 8
_BLOCK_NUMBERS = 1 << 22


def initial_blocks(
    initializer: Any, shape: Sequence[int], dtype: str, seed: int, index: tuple[range, ...]
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
    rule = rule_of(initializer, tuple(shape), dtype, seed)
    if isinstance(rule, np.ndarray):
        yield 0, rule[(slice(rows.start, rows.stop, rows.step), *columns)].astype(numpy_dtype)
        return
    width = math.prod(shape[1:])
    many = max(1, _BLOCK_NUMBERS // max(1, width * rows.step))
    for start in range(0, len(rows), many):
        part = rows[start : start + many]
        run = range(part[0], part[-1] + 1)
        values = rule(seed, run, width)[:: part.step].reshape(len(part), *shape[1:])
        yield start, values[(slice(None), *columns)].astype(numpy_dtype)


def common_seed(seed: int | None, initializer: Any = None) -> int:
    """Return ``seed``, else the initializer's seed, else a new one; all ranks must use the chief's."""
    own = getattr(initializer, "_init_seed", None)
    chosen = seed if seed is not None else own
    if chosen is None:
        return secrets.randbits(63)
    if isinstance(chosen, bool) or not isinstance(chosen, (int, np.integer)) or chosen < 0:
        raise TypeError(describe("seed", chosen, "a whole number >= 0, or None", "pass e.g. 1"))
    return int(chosen)


@dataclass(frozen=True)
class Distribution:
    """A distribution, computed from uniform numbers between 0 and 1; works on arrays and tensors."""

    from_unit: Callable[[Any], Any]

    def __call__(self, seed: int, rows: range, width: int) -> np.ndarray:
        counters = -(-width // _PER_COUNTER)
        philox = np.random.Philox(key=seed, counter=rows.start * counters)
        words = philox.random_raw(len(rows) * counters * _PER_COUNTER // 2).view(np.uint32)
        unit = (words.reshape(len(rows), -1)[:, :width] + 0.5) / 2.0**32
        return self.from_unit(unit)


def rule_of(initializer: Any, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Return the entire array, or a function of the seed, a range of rows and their width."""
    if isinstance(initializer, (int, float)) and not isinstance(initializer, bool):
        return Constant(float(initializer))
    if isinstance(initializer, (np.ndarray, list, tuple, tf.Tensor)):
        return _whole(np.asarray(initializer), shape)
    try:
        made = keras.initializers.get(initializer)
    except ValueError:
        made = None
    known = keras.initializers
    if isinstance(made, known.Zeros | known.Ones):
        return Constant(float(isinstance(made, known.Ones)))
    if isinstance(made, known.Constant) and np.ndim(made.value) == 0:
        return Constant(float(made.value))
    if isinstance(made, known.RandomUniform):
        return _uniform(made.minval, made.maxval)
    if isinstance(made, known.RandomNormal):
        return _normal(made.mean, made.stddev)
    if isinstance(made, known.TruncatedNormal):
        return _truncated(made.mean, made.stddev)
    if isinstance(made, known.VarianceScaling):
        return _variance_scaling(made, shape)
    if not callable(made):
        remedy = "pass e.g. 'uniform', keras.initializers.RandomNormal(0.01) or an array"
        raise TypeError(describe("initializer", initializer, "a Keras initializer, its name, or values", remedy))
    if isinstance(made, known.Initializer) and "seed" in made.get_config():
        made = type(made).from_config({**made.get_config(), "seed": seed % 2**31})
    with tf.init_scope():
        return _whole(tf.convert_to_tensor(made(shape, dtype=dtype)).numpy(), shape)


def _whole(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape:
        raise ValueError(describe("initializer", f"values {list(array.shape)}", f"{list(shape)}", "pass all of them"))
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


def _inverse_normal(probability: Any) -> Any:
    if tf.is_tensor(probability):
        return tf.math.ndtri(probability)
    with tf.init_scope(), tf.device("CPU"):
        return tf.math.ndtri(tf.constant(probability, tf.float64)).numpy()


def _variance_scaling(made: Any, shape: tuple[int, ...]) -> Distribution:
    """Keras's formulas, with the fans of the global shape: stddev = sqrt(scale / n), limit = sqrt(3 scale / n)."""
    field = math.prod(shape[:-2])
    fan_in, fan_out = (shape[0], shape[0]) if len(shape) == 1 else (shape[-2] * field, shape[-1] * field)
    n = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[made.mode]
    scale = made.scale / max(1.0, n)
    if made.distribution == "uniform":
        limit = math.sqrt(3 * scale)
        return _uniform(-limit, limit)
    if made.distribution == "untruncated_normal":
        return _normal(0.0, math.sqrt(scale))
    return _truncated(0.0, math.sqrt(scale) / 0.87962566103423978)  # the stddev of the truncated distribution
