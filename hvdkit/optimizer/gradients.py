"""Check gradients passed by a caller, convert them to tensors, and classify them by their variables' placement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from hvdkit.collectives.conversion import TensorLike, is_symbolic
from hvdkit.errors import describe
from hvdkit.optimizer import sparse
from hvdkit.sharding.shards import AnyVariable, Local, Shard, holding_of

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
Source: TypeAlias = "AnyVariable | tf.Tensor | None"
"""What a gradient is of: a variable, or a tensor that a tape watches; None if the caller did not pass it."""
Kind: TypeAlias = Literal["replicated", "rows", "part", "local", "overwritten"]
T = TypeVar("T")


@dataclass(frozen=True)
class PlacedGradients:
    """Gradients with their variables and how these are placed on ranks.

    Attributes:
        grads: dense tensors, IndexedSlices of tensors, or None.
        variables: one per gradient, or None if the caller did not pass them.
        kinds: one per gradient: "replicated"; "rows" of a table, already summed over all ranks when sent to the owner;
            "part" of a layer that is split along an axis of the mesh; "local"; "overwritten" for variables that are
            overwritten with their gradient (the scales of Keras's float8 layers).
    """

    grads: list[Gradient] = field(default_factory=list)
    variables: list[Source] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)

    def with_grads(self, grads: list[Gradient]) -> PlacedGradients:
        """Return a copy with other gradients of the same variables."""
        return PlacedGradients(grads, self.variables, self.kinds)

    def map(self, fn: Callable[[Gradient, Kind], Gradient]) -> PlacedGradients:
        """Apply ``fn`` to each gradient and its kind."""
        return self.with_grads([fn(g, kind) for g, kind in zip(self.grads, self.kinds, strict=True)])


def map_values(grad: Gradient, fn: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    """Apply ``fn`` to the values of a gradient."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(fn(grad.values), grad.indices, grad.dense_shape)
    return None if grad is None else fn(grad)


def kind_of(variable: AnyVariable | tf.Tensor) -> Kind:
    """Return how ``variable`` is placed on ranks."""
    holding = holding_of(variable)
    if isinstance(holding, Local):
        return "local"
    if isinstance(holding, Shard):
        return "rows" if holding.axis is None else "part"
    return "overwritten" if getattr(variable, "overwrite_with_gradient", False) else "replicated"


def place_gradients(grads: Iterable[TensorLike | None], variables: Iterable[Source] | None = None) -> PlacedGradients:
    """Return ``grads`` as tensors, after all checks that don't involve other ranks.

    Args:
        grads: a sequence of gradients: tensors, arrays, nested lists or tuples of numbers, numbers, IndexedSlices of
            any of these, or None.
        variables: the variables of the gradients in the same order, or None. Numbers, lists and arrays are converted
            to tensors of the variable's dtype.

    Raises:
        TypeError: an element is not a gradient.
        ValueError: an element is inconsistent, or the lists differ in length.
    """
    listed = _listed("grads", grads)
    owners = [None] * len(listed) if variables is None else _listed("variables", variables)
    if len(owners) != len(listed):
        expected = f"{len(listed)}, one for each gradient"
        raise ValueError(describe("variables", f"{len(owners)} of them", expected, "pass both in the same order"))
    converted = [_gradient(f"grads[{i}]", g, v) for i, (g, v) in enumerate(zip(listed, owners, strict=True))]
    return PlacedGradients(converted, owners, ["replicated" if v is None else kind_of(v) for v in owners])


def _listed(name: str, items: Iterable[T]) -> list[T]:
    if isinstance(items, (str, bytes, Mapping, tf.Tensor, np.ndarray)) or not isinstance(items, Iterable):
        raise TypeError(describe(name, type(items).__name__, "a list or tuple", "pass one element per variable"))
    return list(items)


def _gradient(name: str, grad: TensorLike | None, variable: Source) -> Gradient:
    if grad is None:
        return None
    if isinstance(grad, (tf.Variable, keras.Variable)):  # a sum of gradients that a training step has kept
        grad = tf.convert_to_tensor(grad)
    dtype = None if variable is None else tf.as_dtype(variable.dtype)
    result = _rows(name, grad, variable, dtype) if isinstance(grad, tf.IndexedSlices) else _tensor(name, grad, dtype)
    if not result.dtype.is_floating:
        raise TypeError(
            describe(name, result.dtype.name, "a floating-point dtype", "combine other numbers with hk.allreduce")
        )
    return result


def _tensor(name: str, value: TensorLike, dtype: tf.DType | None = None, default_dtype: str = "float32") -> tf.Tensor:
    """Return a tensor unchanged; arrays, numbers, and nested lists and tuples of these as a tensor of ``dtype``.

    ``default_dtype`` is the default for plain Python numbers of the same kind.
    """
    if isinstance(value, tf.Tensor):
        return value
    remedy = "pass tape.gradient's result"
    if not isinstance(value, (np.ndarray, np.generic, list, tuple, int, float)) or isinstance(value, bool):
        expected = "a tensor, an array, a list, IndexedSlices or None"
        raise TypeError(describe(name, type(value).__name__, expected, remedy))
    leaves = tf.nest.flatten(value)
    try:
        if any(isinstance(leaf, tf.Tensor) for leaf in leaves):
            return tf.convert_to_tensor(value, dtype)
        array = np.asarray(value)
    except Exception as error:
        got = f"a {type(value).__name__} that is not a tensor ({error})"
        raise TypeError(describe(name, got, "numbers in a regular shape", remedy)) from error
    is_real = np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)
    if not (is_real or _is_low_precision(array)):
        raise TypeError(describe(name, f"dtype {array.dtype}", "real numbers", remedy))
    is_plain = not any(isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves)
    if dtype is not None:
        array = array.astype(dtype.as_numpy_dtype)
    elif is_plain and (not array.size or array.dtype.kind == np.dtype(default_dtype).kind):
        array = array.astype(default_dtype)
    return tf.convert_to_tensor(array)


def _is_low_precision(array: np.ndarray) -> bool:
    """Return True for float dtypes that NumPy does not define: bfloat16 and float8."""
    try:
        return bool(tf.as_dtype(array.dtype).is_floating)
    except TypeError:
        return False


def _rows(name: str, grad: tf.IndexedSlices, variable: Source, dtype: tf.DType | None) -> tf.IndexedSlices:
    """Return IndexedSlices whose parts are tensors, after checking that they are consistent."""
    parts = (grad.values, grad.indices, grad.dense_shape)
    if any(part is not None and not isinstance(part, tf.Tensor) for part in parts):
        values = _tensor(f"{name}.values", grad.values, dtype)
        indices = _tensor(f"{name}.indices", grad.indices, default_dtype="int32")
        shape = grad.dense_shape
        if isinstance(shape, tf.TensorShape):
            shape = shape.as_list()
        if shape is not None:
            shape = _tensor(f"{name}.dense_shape", shape, default_dtype="int32")
        grad = tf.IndexedSlices(values, indices, shape)
    if variable is not None and kind_of(variable) == "rows":  # from hvdkit's own lookup
        return grad
    if grad.dense_shape is None and variable is not None:
        grad = tf.IndexedSlices(grad.values, grad.indices, tf.constant(tuple(variable.shape), grad.indices.dtype))
    _check_rows(name, grad)
    return grad


def _check_rows(name: str, grad: tf.IndexedSlices) -> None:
    """Raise if the parts of ``grad`` are inconsistent, or a known index is out of range."""
    indices = grad.indices
    values = grad.values
    shape = sparse.dense_shape(grad)
    if indices.dtype not in (tf.int32, tf.int64):
        raise TypeError(describe(f"{name}.indices", indices.dtype.name, "int32 or int64", "pass row numbers"))
    if not indices.shape.is_compatible_with([None]):
        raise ValueError(describe(f"{name}.indices", f"shape {list(indices.shape)}", "one axis", "pass row numbers"))
    rank = values.shape.rank
    if rank == 0 or (rank is not None and not values.shape[:1].is_compatible_with(indices.shape)):
        expected = f"one row for each of the {indices.shape[0]} indices"
        raise ValueError(describe(f"{name}.values", f"shape {list(values.shape)}", expected, "pass [k, ...]"))
    if shape is not None and not values.shape[1:].is_compatible_with(shape[1:]):
        expected = f"rows of shape {list(values.shape[1:])}"
        raise ValueError(describe(f"{name}.dense_shape", list(shape), expected, "pass the variable's shape"))
    if not shape or not tf.executing_eagerly() or is_symbolic(indices) or not indices.shape.num_elements():
        return
    rows = indices.numpy()
    lowest = int(rows.min())
    highest = int(rows.max())
    if lowest < 0 or highest >= shape[0]:
        got = f"{lowest if lowest < 0 else highest}"
        raise ValueError(describe(f"{name}.indices", got, f"rows 0 to {shape[0] - 1}", "pass rows of the variable"))
