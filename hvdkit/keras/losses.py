"""Rescale losses that are not means over rows, so that they match those of one process.

On rank r, a step computes the loss L_r of its n_r rows of a global batch of b rows. Gradients are averaged so that the
job minimizes sum_r (n_r / b) L_r, which is the global loss if L_r is a mean over rows. Other losses are multiplied:

    sums, also of vectors in ``add_loss``:    L_r b / n_r
    means over valid elements or weights:     L_r (V_r / V) (b / n_r),   V = sum_r V_r

with V_r the number of this rank's valid (unmasked) elements, or the sum of its weights. V needs one small allreduce.

A loss that is not a sum or mean of its rows' values is computed by every rank on the gathered labels Y* and predictions
Y of the batch (:mod:`hvdkit.keras.loss_scopes`). Each rank adds the gradient of its own rows, without a collective in
the backward pass:

    dL/dw = sum_r (over the rows i of rank r: dL/dY_i dY_i/dw)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import tensorflow as tf
from keras import tree

from hvdkit import cluster
from hvdkit.collectives.batch_share import gathered_rows, row_ratio
from hvdkit.collectives.gathers import gather_all_rows
from hvdkit.collectives.ops import ReduceOp
from hvdkit.collectives.tensors import grouped_allreduce
from hvdkit.errors import HvdkitError, describe
from hvdkit.internals import (
    get_keras_mask,
    reduce_weighted_values,
    set_keras_mask,
    squeeze_or_expand_to_same_rank,
)
from hvdkit.keras.loss_scopes import LossScopes, Values, by_scope
from hvdkit.keras.moved_weights import depends_on_rows
from hvdkit.keras.shares import number_of_rows

if TYPE_CHECKING:
    from hvdkit.collectives.conversion import TensorLike
    from hvdkit.keras.data_types import Tensors

Nests = TypeVar("Nests", bound=tuple[object, ...])
_MEANS = ("sum_over_batch_size", "mean")


def check_loss(loss: keras.Loss) -> None:
    """Raise HvdkitError for a loss that cannot match that of one process: it is not one number, or reduces itself."""
    reduction = getattr(loss, "reduction", "mean")
    name = getattr(loss, "name", type(loss).__name__)
    if reduction in (None, "none"):
        remedy = (
            "use reduction='sum_over_batch_size', or reduce it in compute_loss; if train_step calls it, keep it in an "
            "attribute of the model instead of compile"
        )
        raise HvdkitError(describe("loss", f"{name} with reduction={reduction!r}", "a loss that is one number", remedy))
    if reduction not in _MEANS and type(loss).__call__ is not keras.losses.Loss.__call__:
        got = f"{name}, whose class has its own __call__, with reduction={reduction!r}"
        raise HvdkitError(describe("loss", got, "Keras's own reduction", "override call instead of __call__"))


def rescaled(loss: object, scopes: LossScopes, data: Tensors) -> object:
    """Rescale ``loss`` so that the ranks' losses add up to that of one process; means over rows are unchanged.

    So are a loss of what the step has gathered from all ranks, not from ``data``, and what is not a Keras loss.
    """
    if not isinstance(loss, keras.losses.Loss):
        return loss
    check_loss(loss)
    return _RescaledLoss(loss, scopes, data)


class _RescaledLoss(keras.losses.Loss):
    """A rescaled Keras loss for a step on a share. Delegates everything else to the loss."""

    def __init__(self, loss: keras.Loss, scopes: LossScopes, data: Tensors) -> None:
        self.__dict__.update(vars(loss))
        self._loss = loss
        self._scopes = scopes
        self._data = data
        self._has_own_call = type(loss).__call__ is not keras.losses.Loss.__call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loss"], name)

    def call(self, y_true: Tensors, y_pred: Tensors) -> tf.Tensor:
        return self._loss.call(y_true, y_pred)

    def __call__(self, y_true: Tensors, y_pred: Tensors, sample_weight: TensorLike | None = None) -> tf.Tensor:
        """Compute the loss as Keras does on this rank's rows, and multiply it; or on the rows of all ranks."""
        loss = self._loss
        if _is_of_all_rows((y_true, y_pred), self._data):
            return loss(y_true, y_pred, sample_weight)
        call = loss if self._has_own_call else loss.call
        in_mask = get_keras_mask(y_pred)
        with keras.name_scope(loss.name):
            if not self._has_own_call:
                y_true, y_pred = tree.map_structure(
                    lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), (y_true, y_pred)
                )
            scope = self._scopes.of_loss(loss, call, y_true, y_pred, sample_weight)

            if self._scopes.stands_in_for(scope):
                return tf.add_n([tf.reduce_mean(tf.square(leaf)) for leaf in tree.flatten(y_pred)])

            def on_rows() -> tf.Tensor:
                value, divisor = self._value(y_true, y_pred, sample_weight, in_mask)
                if divisor is None and loss.reduction != "sum":
                    return value
                return value * tf.cast(_multiplier(divisor), value.dtype)

            def on_batch() -> tf.Tensor:
                gathered, _ = gather_nests((y_true, y_pred, sample_weight, in_mask))
                return self._value(*gathered)[0]

            return by_scope(scope, on_rows, on_batch)

    def _value(
        self, y_true: Tensors, y_pred: Tensors, sample_weight: TensorLike | None, in_mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return the loss of some rows, and its divisor V_r."""
        loss = self._loss
        if self._has_own_call:
            return tf.convert_to_tensor(loss(y_true, y_pred, sample_weight)), None
        values = loss.call(y_true, y_pred)
        masks = [mask for mask in (in_mask, get_keras_mask(values)) if mask is not None]
        mask = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
        options = {"mask": mask, "reduction": loss.reduction, "dtype": loss.dtype}
        value = reduce_weighted_values(values, sample_weight=sample_weight, **options)
        return value, _divisor(values, sample_weight, mask, loss.reduction)


def gather_nests(nests: Nests) -> tuple[Nests, tf.Tensor]:
    """Gather the rows of all tensors in ``nests`` from all ranks, with the gradient of this rank's rows.

    Numbers, scalars and None stay as they are. A mask that Keras keeps with a tensor is gathered, too.

    Returns:
        The nests; and the number of rows before this rank's, an int32 scalar.

    Raises:
        HvdkitError: a tensor is ragged, sparse or of strings.
    """
    leaves = tree.flatten(nests)
    with_rows = [number for number, leaf in enumerate(leaves) if len(getattr(leaf, "shape", ()))]
    for number in with_rows:
        if not isinstance(leaves[number], tf.Tensor) or leaves[number].dtype == tf.string:
            got = f"labels or predictions as {type(leaves[number]).__name__} of {leaves[number].dtype.name}"
            remedy = "pass numbers, padded to one shape, or loss_scope='rows'"
            raise HvdkitError(describe("loss", got, "tensors whose rows can be gathered", remedy))
    masks = {number: mask for number in with_rows if (mask := get_keras_mask(leaves[number])) is not None}
    rows, starts = gather_all_rows([*(leaves[number] for number in with_rows), *masks.values()])
    for number, gathered in zip(with_rows, rows, strict=False):
        leaves[number] = gathered
    for number, mask in zip(masks, rows[len(with_rows) :], strict=True):
        set_keras_mask(leaves[number], mask)
    packed: Nests = tree.pack_sequence_as(nests, leaves)
    return packed, starts[0]


def on_gathered_rows(call: Values, y_true: Tensors, y_pred: Tensors) -> tf.Tensor:
    """Return a metric function of the gathered rows: its number, or its values for this rank's rows."""
    (all_true, all_pred), start = gather_nests((y_true, y_pred))
    values = tf.convert_to_tensor(call(all_true, all_pred))
    if values.shape.rank == 0:
        return values
    own = start + tf.range(tf.shape(tree.flatten(y_pred)[0])[0])
    return tf.gather(values, tf.minimum(own, tf.shape(values)[0] - 1))  # a rank without rows has one, with weight 0


def rescaled_vector(loss: object, value: tf.Tensor, rows: int | tf.Tensor) -> tf.Tensor:
    """Return the sum ``value`` of a loss that a layer has added, as a part of the global sum.

    ``loss`` is what was passed to ``add_loss``: a tensor with ``rows`` rows is a sum over them, anything else a mean.
    """
    shape = getattr(loss, "shape", None)
    if shape is None or not tf.TensorShape(shape).rank:
        return value
    length = tf.TensorShape(shape)[0]
    if length is not None and isinstance(rows, int) and length != rows:
        return value
    return value * tf.cast(_multiplier(None), value.dtype)


def divided_by_all_rows(
    regularizer: Callable[[tf.Tensor], tf.Tensor], data: Tensors
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return an activity regularizer whose value, if it is of gathered rows, is n_r / b of the original.

    Keras divides the value by the rows of the layer's outputs, which are this rank's, as are those of ``data``.
    """

    def regularize(outputs: tf.Tensor) -> tf.Tensor:
        before = gathered_rows()
        value = regularizer(outputs)
        has_gathered = gathered_rows() != before if tf.executing_eagerly() else not depends_on_rows(value, data)
        return value * tf.cast(tf.math.reciprocal_no_nan(row_ratio()), value.dtype) if has_gathered else value

    return regularize


def _is_of_all_rows(values: tuple[Tensors, ...], data: Tensors) -> bool:
    """Return True if labels and predictions are of rows that the step has gathered from all ranks.

    Tensors of eager mode don't tell from what they were computed, so the number of predictions decides.
    """
    if tf.inside_function():
        return not depends_on_rows(values, data)
    if not gathered_rows():
        return False
    shape: tf.TensorShape | tuple[int, ...] = getattr(tree.flatten(values[-1])[0], "shape", ())
    rows = int(shape[0]) if len(shape) else None
    return rows in gathered_rows() and rows != number_of_rows(data)


def _divisor(
    values: tf.Tensor, sample_weight: TensorLike | None, mask: tf.Tensor | None, reduction: str
) -> tf.Tensor | None:
    """Return V_r; None if the loss is a sum or a mean over all elements."""
    if reduction in _MEANS:
        sample_weight = None  # only multiplies the values
    if reduction == "sum" or (sample_weight is None and mask is None):
        return None
    if sample_weight is None:
        return tf.cast(tf.math.count_nonzero(mask), tf.float64)
    weights = tf.convert_to_tensor(sample_weight)
    if mask is not None:
        mask, weights = squeeze_or_expand_to_same_rank(tf.cast(mask, weights.dtype), weights)
        weights *= mask
    return tf.cast(tf.reduce_sum(squeeze_or_expand_to_same_rank(values, weights)[1]), tf.float64)


def _multiplier(divisor: tf.Tensor | None) -> tf.Tensor:
    """Return ``(V_r / V) (b / n_r)``, or ``b / n_r`` without a divisor V_r; 0 on a rank without rows."""
    ratio = row_ratio()
    if divisor is None:
        return ratio
    divisor = tf.stop_gradient(tf.math.multiply_no_nan(divisor, tf.sign(ratio)))
    total = grouped_allreduce([divisor], ReduceOp.Sum, "hvdkit.loss", cluster.data_group())[0]
    return tf.stop_gradient(tf.math.divide_no_nan(divisor, total) * ratio)
