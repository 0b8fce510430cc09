"""Find models whose output for a row depends on the other rows of its batch: ranks have other rows than one process."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from hvdkit.errors import HvdkitError, describe, see
from hvdkit.keras.shares import AnyTensor, number_of_rows, slice_tensor
from hvdkit.keras.source_checks import is_of_library
from hvdkit.keras.unchanged_models import random_layers_in_inference, trying_calls, values_of
from hvdkit.sharding.shards import holding_of

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Tensors

_TOLERANCE = 1e-4  # of the largest magnitude
_HALF_TOLERANCE = 2e-2  # of 16-bit outputs


def couples_rows(model: keras.Model, rows: Tensors, *, trains: bool) -> str:
    """Return when the outputs of a row change with the other rows: "in inference", "in training", or "" for never.

    The first row keeps its outputs if all others become copies of it, and so does the last; the batch keeps its size.
    In training, random layers of Keras and BatchNormalization compute as in inference. Models that are random, keep a
    state, have sharded tables or cannot be called with these rows are not tested. Every rank must call it, since
    functions of the program may have graphs with collectives; state may change, so call it within ``unchanged``.
    ``rows`` are a few rows of inputs; ``trains`` is False for a model that is only evaluated.
    """
    if type(model).call is keras.Model.call or not (number := _number_of_rows(rows)):
        return ""
    layers = list(model._flatten_layers())
    if any(holding_of(v) is not None for v in model.variables):
        return ""
    own = [layer for layer in layers if not is_of_library(type(layer))]
    # A model may call a collective, or have a layer for training only.
    with trying_calls(layers), contextlib.ExitStack() as stack:
        if _changes(functools.partial(model, training=False), rows, number):
            return "in inference"
        if trains and any("training" in inspect.signature(layer.call).parameters for layer in own):
            stack.enter_context(random_layers_in_inference(layers))
            weights = values_of(v for layer in own for v in layer._trainable_variables)  # e.g. of a spectral norm
            stack.callback(lambda: [variable.assign(value) for variable, value in weights])
            if _changes(functools.partial(model, training=True), rows, number):
                return "in training"
    return ""


def _changes(call: Callable[[Tensors], Tensors], rows: Tensors, number: int) -> bool:
    """Return True if the outputs of the first or the last row change with the other rows."""
    expected = _outputs(call, rows)
    changed = False
    for row in (0, number - 1):
        copies = tree.map_structure(lambda leaf, row=row: _copies(leaf, row, number), rows)
        changed = changed or _differ(_outputs(call, copies), expected, row)
    if not changed:
        return False
    again = _outputs(call, rows)
    return not any(_differ(again, expected, row) for row in range(number))


def refuse_coupled_rows(model: keras.Model, when: str) -> None:
    """Raise HvdkitError for a model that :func:`couples_rows`."""
    got = f"{model.name!r}, whose output for a row depends on the other rows of its batch {when}"
    expected = "outputs of a row that depend on this row only, as each rank computes its own rows"
    remedy = (
        "compute them for each row, e.g. keras.ops.sum(x * y, axis=-1) in place of a tensordot over the batch, or from "
        "hk.gather_rows of what is compared; or pass loss_scope='rows' to hk.fit if each rank may use its own rows"
    )
    raise HvdkitError(describe("model", got, expected, f"{remedy}; {see('pitfalls#layers-that-compare-rows')}"))


def _number_of_rows(rows: Tensors) -> int:
    """Return the number of rows that all tensors have; 0 for one row, and for tensors of different lengths."""
    leaves = [leaf for leaf in tree.flatten(rows) if leaf is not None]
    if any(leaf.shape.rank == 0 for leaf in leaves):
        return 0
    numbers = {int(number_of_rows(leaf)) for leaf in leaves}
    return numbers.pop() if len(numbers) == 1 and min(numbers) > 1 else 0


def _copies(leaf: AnyTensor | None, row: int, number: int) -> AnyTensor | None:
    if leaf is None:
        return None
    copies = [slice_tensor(leaf, row, row + 1)] * number
    return tf.sparse.concat(0, copies) if isinstance(leaf, tf.SparseTensor) else tf.concat(copies, axis=0)


def _outputs(call: Callable[[Tensors], Tensors], rows: Tensors) -> list[tf.Tensor]:
    number = _number_of_rows(rows)
    floats = [x for x in tree.flatten(call(rows)) if isinstance(x, tf.Tensor) and x.dtype.is_floating]
    return [x for x in floats if x.shape.rank and x.shape[0] == number]


def _differ(outputs: list[tf.Tensor], expected: list[tf.Tensor], row: int) -> bool:
    """Return True if a row of outputs has other values."""
    for one, other in zip(outputs, expected, strict=True):
        limit = (_HALF_TOLERANCE if one.dtype.size == 2 else _TOLERANCE) * np.abs(_float64(other)).max(initial=0.0)
        if one.shape != other.shape or np.any(np.abs(_float64(one[row]) - _float64(other[row])) > limit):
            return True
    return False


def _float64(tensor: tf.Tensor) -> np.ndarray:
    return np.asarray(tf.cast(tensor, tf.float64))
