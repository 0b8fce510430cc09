"""Keep rows of the first batch, which a step has as symbolic tensors."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import xxhash
from keras import tree

from hvdkit import cluster
from hvdkit.collectives import broadcast_object
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.keras.shares import first_tensor, number_of_rows, slice_tensor

ROWS = 2


def store_once(is_stored: tf.Variable, tensors: Sequence[tf.Tensor], store: Callable[..., None]) -> None:
    """Call ``store`` with the values of ``tensors``, in the first step that runs or again once ``is_stored`` is False.

    Args:
        is_stored: a bool variable.
        tensors: of a step, in eager mode or in a graph.
        store: a function, or a method, which the caller keeps: TensorFlow never frees a numpy_function.
    """
    if tf.executing_eagerly():
        if not bool(is_stored):
            store(*(np.array(tensor.numpy()) for tensor in tensors))
            is_stored.assign(True)
        return
    reference = weakref.WeakMethod(store) if inspect.ismethod(store) else weakref.ref(store)

    def store_if_kept(*arrays: np.ndarray) -> np.bool_:
        kept = reference()
        if kept is not None:
            kept(*(np.array(array) for array in arrays))
        return np.bool_(True)

    run = lambda: tf.ensure_shape(tf.numpy_function(store_if_kept, tensors, tf.bool), [])  # noqa: E731
    is_stored.assign(tf.cond(is_stored, lambda: True, run))


class FirstRows:
    """Keeps the chief's first rows of the first batch, which a step has as symbolic tensors."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] | None = None  # on the chief
        self._structure: Any = None
        self._is_stored = untracked_variable(False, tf.bool, "hvdkit_has_first_rows")

    def observe(self, data: Any, number: int) -> None:
        """Store the inputs of the first ``number`` rows of a batch, in eager mode or in a graph."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        if first_tensor(x) is None:
            return
        count = tf.minimum(number, number_of_rows(x))
        self._structure = tree.map_structure(lambda leaf: _first_rows(leaf, count), x)
        tensors = tf.nest.flatten(self._structure, expand_composites=True)
        if cluster.is_chief():
            store_once(self._is_stored, tensors, self._store)

    def _store(self, *arrays: np.ndarray) -> None:
        self._arrays = list(arrays)

    def digest(self) -> str:
        """Return a digest of the rows that this rank has stored; "" without any."""
        hasher = xxhash.xxh3_128()
        for array in self._arrays or ():
            hasher.update(repr(array.tolist()).encode())
        return "" if self._arrays is None else hasher.hexdigest()

    def broadcast(self) -> Any:
        """Return the chief's rows; None if no step has stored any. Every rank must call it."""
        arrays = broadcast_object(self._arrays)
        if arrays is None or self._structure is None:
            return None
        tensors = [tf.constant(array) for array in arrays]
        return tf.nest.pack_sequence_as(self._structure, tensors, expand_composites=True)


def _first_rows(leaf: Any, count: Any) -> Any:
    return leaf if leaf is None or leaf.shape.rank == 0 else slice_tensor(leaf, 0, count)


def rows_to_compare(model: Any) -> int:
    """Return the number of rows to compute: a model with a fixed batch size takes that many."""
    inputs = getattr(model, "inputs", None) or ()
    fixed = (x.shape[0] for x in inputs if len(x.shape) and x.shape[0] is not None)
    return next(fixed, ROWS)
