"""Digests of batches, and of variables' values at about memory speed.

They are meant for comparison, and are not cryptographically secure.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import xxhash

from hvdkit.errors import describe

_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, for multiplicative hashing


def digest(variable: object) -> bytes:
    """Return a 16-byte digest (XXH3-128) of a variable's dtype, shape and values, bit for bit.

    0.0 and -0.0 have different digests, NaNs with equal bits the same. On a CPU the values are read in place; from a
    GPU one variable is copied at a time. Other threads can run meanwhile.

    Raises:
        TypeError: ``variable`` is not a variable.
    """
    inner = tf_variable(variable)
    hasher = xxhash.xxh3_128(f"{tf.as_dtype(inner.dtype).name}{tuple(inner.shape)}".encode())
    value = inner.read_value()
    if value.dtype == tf.string:
        hasher.update(tf.io.serialize_tensor(value).numpy())
    else:  # Reshape first, because NumPy cannot view a bfloat16 scalar. Neither the reshape nor the view copies.
        hasher.update(np.asarray(tf.reshape(value, [-1])).view(np.uint8).data)
    return hasher.digest()


def tf_variable(variable: object) -> tf.Variable:
    """Return the TensorFlow variable: ``variable`` itself, or the one that a Keras variable wraps.

    Raises:
        TypeError: ``variable`` is not a variable.
    """
    inner = variable if hasattr(variable, "read_value") else getattr(variable, "value", None)
    if not hasattr(inner, "read_value"):
        raise TypeError(
            describe("variables", type(variable).__name__, "TensorFlow or Keras variables", "pass e.g. model.variables")
        )
    return inner


def digest_of_batch(data: object) -> tf.Tensor:
    """Return an int64 hash of a batch's first rows, last rows and numbers of rows."""

    def ends(x: tf.Tensor) -> tf.Tensor | tuple[tf.Tensor, ...]:
        return (x[:1], x[-1:], tf.shape(x)[0]) if x.shape.rank else x

    return hash_of([ends(x) for x in tf.nest.flatten(data, expand_composites=True) if x is not None])


def hash_of(data: object) -> tf.Tensor:
    """Return an int64 hash of all tensors in a structure, including their dtypes and shapes."""
    total = tf.zeros([], tf.int64)
    for x in tf.nest.flatten(data, expand_composites=True):
        total = total * 1_000_003 + tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(x), 2**62)
    return total


def digest_in_any_order(data: object) -> tf.Tensor:
    """Return an int64 hash of a batch's rows in any order: the sum over batches depends on their rows only.

    Reads at most about 1,024 evenly spaced elements of a row. Of ragged and sparse tensors, it reads each value.
    """
    total = tf.zeros([], tf.int64)
    for number, x in enumerate(tf.nest.flatten(data)):
        if isinstance(x, tf.RaggedTensor):
            x = x.flat_values
        elif isinstance(x, tf.SparseTensor):
            x = x.values
        if tf.is_tensor(x) and x.shape.rank and _is_value(x.dtype):
            total += (2 * number + 1) * _hash_of_rows(x)
    return total


def _is_value(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype in (tf.bool, tf.string)


def _bits(x: tf.Tensor) -> tf.Tensor:
    """Return the values as int64, bit by bit."""
    if x.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(x, 2**62)
    if x.dtype != tf.bool:
        x = tf.bitcast(x, {1: tf.int8, 2: tf.int16, 4: tf.int32}.get(x.dtype.size, tf.int64))
    return tf.cast(x, tf.int64)


def _hash_of_rows(x: tf.Tensor) -> tf.Tensor:
    """Return the sum over rows of a hash of each, of ``[rows, ...]``; products overflow, as they should."""
    columns = tf.reduce_prod(tf.shape(x)[1:])
    rows = _bits(tf.reshape(x, [tf.shape(x)[0], columns])[:, :: tf.maximum(columns // 1024, 1)])
    factors = tf.range(1, tf.shape(rows)[1] + 1, dtype=tf.int64) * _ODD
    hashes = (tf.reduce_sum(rows * factors, axis=1) + 1) * _ODD
    upper = tf.bitwise.right_shift(hashes, tf.constant(32, tf.int64))
    return tf.reduce_sum(tf.bitwise.bitwise_xor(hashes, upper) * _ODD)
