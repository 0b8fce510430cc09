"""Softmax cross-entropy over a vocabulary that is sharded along a mesh axis."""

from __future__ import annotations

from collections.abc import Callable

import numpy.typing as npt
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.conversion import graph_safe
from hvdkit.collectives.ops import Max, Sum
from hvdkit.errors import describe, integer
from hvdkit.layers.axis_collectives import reduce_over
from hvdkit.sharding.partition import rows_of


@graph_safe
def vocabulary_parallel_cross_entropy(
    labels: npt.ArrayLike | tf.Tensor, logits: npt.ArrayLike | tf.Tensor, vocabulary: int, *, axis: str = "model"
) -> tf.Tensor:
    """Return each example's softmax cross-entropy without gathering the logits.

    With z_v the logits of all ranks, m their maximum and y the label:

        loss = log sum_v exp(z_v - m) + m - z_y,      d loss / d z_v = exp(z_v - m) / sum - [v = y]

    Ranks exchange three numbers per example: the maximum, the sum, and the label's logit (Shoeybi et al.,
    "Megatron-LM", arXiv:1909.08053, section 3).

    Args:
        labels: ``[...]`` integers, the same on all ranks of the axis.
        logits: ``[..., local]``, this rank's columns, the output of ``hk.layers.ColumnParallelDense(vocabulary)``.
        vocabulary: number of columns over all ranks.
        axis: the mesh axis.

    Returns:
        ``[...]``, the same on all ranks of the axis. A label out of range gives NaN.

    Raises:
        ValueError: ``logits`` are not this rank's columns.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()  # mesh={"data": 2, "model": 2} on 4 ranks
        >>> logits = hk.layers.ColumnParallelDense(50_000, kernel_initializer="zeros")(tf.ones([2, 8]))
        >>> losses = hk.layers.vocabulary_parallel_cross_entropy([3, 49_999], logits, 50_000)
        >>> losses.shape, round(float(losses[0]), 2)  # log 50000
        (TensorShape([2]), 10.82)
    """
    group = cluster.group(axis)
    logits = tf.convert_to_tensor(logits)
    labels = tf.convert_to_tensor(labels)
    columns = rows_of("div", integer("vocabulary", vocabulary, minimum=1), group.index, group.size)
    if logits.shape[-1] != len(columns):
        expected = f"{len(columns)} columns, this rank's of {vocabulary}"
        raise ValueError(describe("logits", f"shape {logits.shape}", expected, "pass ColumnParallelDense's outputs"))
    labels = tf.cast(labels, tf.int64)
    local = labels - columns.start
    onehot = tf.one_hot(local, len(columns), dtype=logits.dtype)  # zeros if the label belongs to another rank

    @tf.custom_gradient
    def losses(logits: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        low = tf.fill(tf.shape(logits)[:-1], logits.dtype.min)
        top = tf.reduce_max(logits, axis=-1) if len(columns) else low
        top = reduce_over(top, Max, group, "hvdkit.softmax_max")
        powers = tf.exp(logits - top[..., None])
        total = reduce_over(tf.reduce_sum(powers, axis=-1), Sum, group, "hvdkit.softmax_sum")
        chosen = reduce_over(tf.reduce_sum(logits * onehot, axis=-1), Sum, group, "hvdkit.softmax_label")
        valid = tf.logical_and(labels >= 0, labels < vocabulary)
        loss = tf.where(valid, tf.math.log(total) + top - chosen, tf.constant(float("nan"), logits.dtype))
        return loss, lambda upstream: upstream[..., None] * (powers / total[..., None] - onehot)

    return losses(logits)
