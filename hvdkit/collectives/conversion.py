"""Conversion of Python numbers, NumPy arrays and TensorFlow tensors to tensors, and of results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.errors import describe
from hvdkit.internals import ResourceVariable

if TYPE_CHECKING:
    import keras

TensorLike: TypeAlias = "npt.ArrayLike | tf.Tensor | tf.Variable | keras.Variable | tf.IndexedSlices"
"""What users pass to collectives."""
SameKind: TypeAlias = Any
"""What collectives return: a number, NumPy array, tensor or IndexedSlices, of the kind of what was passed."""
F = TypeVar("F", bound=Callable[..., object])
# Collectives build graph nodes in plain Python, which AutoGraph need not convert.
graph_safe: Callable[[F], F] = tf.autograph.experimental.do_not_convert


def is_symbolic(x: object) -> bool:
    """Return True for a tensor inside a graph, whose value is not known yet."""
    return isinstance(x, tf.Tensor) and not hasattr(x, "numpy")


def as_tensor(x: TensorLike) -> tf.Tensor:
    """Return ``x`` (number, list, array, tensor, TensorFlow or Keras variable) as a tensor.

    Raises:
        TypeError: ``x`` is not dense and numeric.
    """
    if isinstance(x, tf.Tensor):
        return x
    if isinstance(x, (tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)):
        is_rows = isinstance(x, tf.IndexedSlices)
        remedy = "use hk.allreduce or hk.average_gradients" if is_rows else "pass its parts instead"
        raise TypeError(describe("x", type(x).__name__, "a dense tensor", remedy))
    value = getattr(x, "value", x)
    if isinstance(value, (tf.Variable, tf.Tensor)):
        return tf.convert_to_tensor(value)
    if isinstance(x, tf.Variable):
        return tf.convert_to_tensor(x)
    try:
        array = np.asarray(x)
    except ValueError as error:
        got = f"{type(x).__name__} of different shapes ({error})"
        remedy = "use hk.grouped_allreduce or hk.grouped_allgather for several arrays"
        raise ValueError(describe("x", got, "numbers of one shape", remedy)) from error
    if not _holds_numbers(array.dtype):
        got = f"{type(x).__name__} with dtype {array.dtype}"
        raise TypeError(describe("x", got, "numbers or bools", "send objects with hk.allgather_object"))
    return tf.convert_to_tensor(array)


def _holds_numbers(dtype: np.dtype) -> bool:
    # Ask TensorFlow instead of NumPy, which regards bfloat16 as "void".
    try:
        return bool(tf.as_dtype(dtype) != tf.string)
    except TypeError:
        return False


def result_converter(original: TensorLike) -> Callable[[tf.Tensor | np.ndarray], SameKind]:
    """Return the function that converts a result to the kind of ``original``.

    Tensors and variables give tensors; everything else gives NumPy arrays, or plain numbers for scalar results.
    """
    if isinstance(original, (tf.Tensor, tf.Variable)) or isinstance(getattr(original, "value", None), tf.Variable):
        return lambda y: tf.convert_to_tensor(y)
    if type(original) in (bool, int, float):
        return lambda y: _array(y).item() if np.ndim(y) == 0 else _array(y)
    # NumPy scalars stay scalars.
    return lambda y: _array(y)[()] if np.ndim(y) == 0 and not isinstance(original, np.ndarray) else _array(y)


def _array(y: tf.Tensor | np.ndarray) -> np.ndarray:
    # numpy() copies, so that the caller may write to the result; np.asarray would share TensorFlow's memory.
    return np.asarray(y.numpy() if isinstance(y, tf.Tensor) else y)


def untracked_variable(value: float | np.ndarray, dtype: tf.DType, name: str) -> tf.Variable:
    """Return a variable on the CPU that can also be created while a function is traced.

    ``tf.function`` tracks each ``tf.Variable`` created in its first trace, even under ``tf.init_scope``, and then
    traces the function again. It does not track this class.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(value, trainable=False, dtype=dtype, name=name)
