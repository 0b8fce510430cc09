"""Python numbers, NumPy arrays and TensorFlow tensors in, the same kind out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

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
    if isinstance(x, (tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)):
        remedy = (
            "use hk.average_gradients for gradients" if isinstance(x, tf.IndexedSlices) else "pass its parts instead"
        )
        raise TypeError(describe("x", type(x).__name__, "a dense tensor", remedy))
    value = getattr(x, "value", x)
    if isinstance(value, (tf.Variable, tf.Tensor)):
        return tf.convert_to_tensor(value)
    if not isinstance(x, tf.Variable):
        array = np.asarray(x)
        if array.dtype == object or array.dtype.kind in "USVmM":
            raise TypeError(
                describe("x", type(x).__name__, "numbers or bools", "send objects with hk.allgather_object")
            )
        x = array
    return tf.convert_to_tensor(x)


def like(original: Any) -> Callable[[tf.Tensor | np.ndarray], Any]:
    """Return the function that gives a result the kind of ``original``.

    Tensors and variables give tensors; everything else gives NumPy, a plain number where the result is one.
    """
    if isinstance(original, (tf.Tensor, tf.Variable)) or isinstance(getattr(original, "value", None), tf.Variable):
        return tf.convert_to_tensor
    if isinstance(original, (bool, int, float)):
        return lambda y: np.asarray(y)[()].item() if np.ndim(y) == 0 else np.asarray(y)
    return lambda y: np.asarray(y)[()] if np.ndim(y) == 0 and not isinstance(original, np.ndarray) else np.asarray(y)
