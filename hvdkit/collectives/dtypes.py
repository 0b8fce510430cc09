"""Wire dtypes: the dtypes in which values are reduced and moved, and the conversions to and from them.

Horovod supports only some of TensorFlow's dtypes. The others are converted:

* moving (allgather, broadcast, alltoall): any other fixed-size dtype bit for bit as integers; float8 and 4-bit
  integers, which TensorFlow cannot reinterpret, in a wider dtype that represents all their values;
* reducing: bfloat16 in float32; small integers and bool in int32 (bool: Min is *and*, Max is *or*).

The same rules apply to all message sizes, in eager mode and in graphs:

* Sum and Product: partial results have the wire dtype. Integers wrap around.
* Average of floats: each value is multiplied by 1/N before the sum, so that the sum does not overflow if the average
  does not. float64 is divided after the sum, because Horovod stores factors in float32. Average of integers: the sum,
  in 64 bits, is divided by N and rounded toward zero.
* Min and Max: NaN propagates, as in NumPy. MPI's comparison of floats may lose NaN, so floats are compared as integers
  with the same order: the bits of the float, with all bits but the sign inverted for negative values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvdkit.collectives.ops import ReduceOp
from hvdkit.errors import describe

_REDUCED = {tf.int32, tf.int64, tf.float16, tf.float32, tf.float64}
_MOVED = _REDUCED | {tf.uint8, tf.int8, tf.uint16, tf.int16, tf.bool}
_REDUCED_IN = {
    tf.bfloat16: tf.float32,
    tf.uint8: tf.int32,
    tf.int8: tf.int32,
    tf.uint16: tf.int32,
    tf.int16: tf.int32,
    tf.uint32: tf.int64,
    tf.bool: tf.int32,
}
Decode = Callable[[tf.Tensor], tf.Tensor]


@functools.cache
def wire_dtype(dtype: tf.DType, op: ReduceOp) -> tf.DType:
    """Return the dtype in which values of ``dtype`` are reduced by ``op``.

    Raises:
        TypeError: Horovod cannot reduce ``dtype``, and there isn't a sufficiently exact conversion.
    """
    dtype = tf.as_dtype(dtype)
    wire = dtype if dtype in _REDUCED else _REDUCED_IN.get(dtype)
    if op == ReduceOp.Average and wire == tf.int32:
        wire = tf.int64
    if dtype == tf.bool and op not in (ReduceOp.Min, ReduceOp.Max):
        wire = None
    if op == ReduceOp.Adasum and not dtype.is_floating:
        wire = None
    if wire is None:
        raise TypeError(
            describe(
                "x",
                f"dtype {dtype.name} with op {op.name}",
                "a real number that Horovod can reduce (bool: Min and Max only)",
                "cast it first, e.g. tf.cast(x, tf.float32)",
            )
        )
    return wire


def average_factor(wire: tf.DType, op: ReduceOp, size: int) -> float:
    """Return the factor of each value in dtype ``wire``: 1/N for an average, unless its sum is divided afterwards."""
    is_scaled = op == ReduceOp.Average and tf.as_dtype(wire) in (tf.float16, tf.float32)
    return float(np.float32(1.0 / size)) if is_scaled else 1.0


def encoded(
    x: tf.Tensor, op: ReduceOp, size: int, prescale: float = 1.0, postscale: float = 1.0
) -> tuple[tf.Tensor, Decode]:
    """Return ``prescale * x`` in its wire dtype, and the function that converts the reduced values back.

    For an average, the caller multiplies the values by :func:`average_factor` before their sum.
    """
    wire = wire_dtype(x.dtype, op)
    values = scaled(tf.cast(x, wire), prescale)
    restore: Decode = tf.identity
    if op in (ReduceOp.Min, ReduceOp.Max) and wire.is_floating:
        values, restore = ordered(values, op)
    is_divided = op == ReduceOp.Average and average_factor(wire, op, size) == 1.0

    def decode(reduced: tf.Tensor) -> tf.Tensor:
        y = restore(reduced)
        if is_divided:
            y = divided(y, size)
        return tf.cast(scaled(y, postscale), x.dtype)

    return values, decode


def divided(total: tf.Tensor, size: int) -> tf.Tensor:
    """Return ``total / size``, rounded toward zero for integers."""
    return tf.truncatediv(total, tf.cast(size, total.dtype)) if total.dtype.is_integer else total / size


def scaled(x: tf.Tensor, factor: float) -> tf.Tensor:
    """Return ``x * factor``. Integers are multiplied in float64 and rounded toward zero, float16 in float32."""
    if factor == 1.0:
        return x
    wide = tf.float64 if x.dtype.is_integer else tf.float32 if x.dtype == tf.float16 else x.dtype
    return tf.cast(tf.cast(x, wide) * tf.cast(factor, wide), x.dtype)


def ordered(x: tf.Tensor, op: ReduceOp) -> tuple[tf.Tensor, Decode]:
    """Return integers with the same order as the floats ``x``, and the function that converts them back.

    The smallest and the largest integer both represent NaN: the one that wins ``op``, Min or Max, is sent.
    """
    floats, integers = (tf.float64, tf.int64) if x.dtype == tf.float64 else (tf.float32, tf.int32)

    def flipped(bits: tf.Tensor) -> tf.Tensor:
        return tf.where(bits < 0, tf.bitwise.bitwise_xor(bits, integers.max), bits)

    order = flipped(tf.bitcast(tf.cast(x, floats), integers))
    winner = tf.constant(integers.max if op == ReduceOp.Max else integers.min, integers)
    return tf.where(tf.math.is_nan(x), winner, order), lambda y: tf.cast(tf.bitcast(flipped(y), floats), x.dtype)


def check_movable(dtype: tf.DType) -> None:
    """Raise TypeError if values of ``dtype`` cannot be moved exactly."""
    if dtype not in _MOVED and not (dtype.is_floating or dtype.is_integer):
        raise TypeError(
            describe(
                "x", f"dtype {dtype.name}", "a real number or bool", "send it with hk.allgather_object or as numbers"
            )
        )


def as_movable(x: tf.Tensor) -> tuple[tf.Tensor, Decode]:
    """Return ``x`` in a dtype that Horovod can move, and the function that converts a result back."""
    check_movable(x.dtype)
    if x.dtype in _MOVED:
        return x, tf.identity
    if x.dtype.size == 1:
        wider = tf.float16 if x.dtype.is_floating else tf.int8
        return tf.cast(x, wider), lambda y: tf.cast(y, x.dtype)
    whole = {2: tf.uint16, 4: tf.int32, 8: tf.int64}[x.dtype.size]
    return tf.bitcast(x, whole), lambda y: tf.bitcast(y, x.dtype)
