"""Python numbers, NumPy arrays and TensorFlow tensors in, the same kind out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvdkit.errors import describe

# Collectives are Python that builds graph nodes; AutoGraph has nothing to rewrite in them.
graph_safe = tf.autograph.experimental.do_not_convert


def is_symbolic(x: Any) -> bool:
    """Return True for a tensor inside a graph: its value is not known yet."""
    return isinstance(x, tf.Tensor) and not hasattr(x, "numpy")


def as_tensor(x: Any) -> tf.Tensor:
    """Return ``x`` (number, list, array, tensor, TensorFlow or Keras variable) as a tensor.

    Raises:
        TypeError: ``x`` is no dense tensor of numbers.
    """
    if isinstance(x, tf.Tensor):
        return x
    original = x
    if isinstance(x, (tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)):
        remedy = (
            "use hk.average_gradients for gradients" if isinstance(x, tf.IndexedSlices) else "pass its parts instead"
        )
        raise TypeError(describe("x", type(x).__name__, "a dense tensor", remedy))
    value = getattr(x, "value", x)
    if isinstance(value, (tf.Variable, tf.Tensor)):
        return tf.convert_to_tensor(value)
    if not isinstance(x, tf.Variable):
        try:
            x = np.asarray(x)
        except ValueError as error:
            got = f"{type(original).__name__} of unlike shapes ({error})"
            remedy = "use hk.grouped_allreduce or hk.grouped_allgather for several arrays"
            raise ValueError(describe("x", got, "numbers of one shape", remedy)) from error
        if not _holds_numbers(x.dtype):
            got = f"{type(original).__name__} with dtype {x.dtype}"
            raise TypeError(describe("x", got, "numbers or bools", "send objects with hk.allgather_object"))
    return tf.convert_to_tensor(x)


def _holds_numbers(dtype: np.dtype) -> bool:
    # By TensorFlow's list and not by NumPy's kinds: to NumPy a bfloat16 is "void".
    try:
        return tf.as_dtype(dtype) != tf.string
    except TypeError:
        return False


def like(original: Any) -> Callable[[tf.Tensor | np.ndarray], Any]:
    """Return the function that gives a result the kind of ``original``.

    Tensors and variables give tensors; everything else gives NumPy, a plain number where the result is one.
    """
    if isinstance(original, (tf.Tensor, tf.Variable)) or isinstance(getattr(original, "value", None), tf.Variable):
        return tf.convert_to_tensor
    if type(original) in (bool, int, float):
        return lambda y: _array(y).item() if np.ndim(y) == 0 else _array(y)
    # NumPy's own scalars are no arrays, and do not become arrays.
    return lambda y: _array(y)[()] if np.ndim(y) == 0 and not isinstance(original, np.ndarray) else _array(y)


def _array(y: tf.Tensor | np.ndarray) -> np.ndarray:
    # numpy() copies, so that the caller may write to the result; np.asarray would show TensorFlow's own memory.
    return np.asarray(y.numpy() if isinstance(y, tf.Tensor) else y)


def note_variable(value: int, dtype: tf.DType, name: str) -> tf.Variable:
    """Return a variable on the CPU, which may also be made while a function is traced.

    ``tf.function`` takes note of each ``tf.Variable`` that is made in its first trace, also under ``tf.init_scope``,
    and traces the function again. It takes no note of this class.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(value, trainable=False, dtype=dtype, name=name)
