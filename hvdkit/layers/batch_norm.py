"""BatchNormalization over ranks: statistics of the global batch, or averages of the ranks' moving statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.logs import warn_once
from hvdkit.collectives import Average, Sum, allreduce, grouped_allreduce
from hvdkit.collectives.batch_share import gradient_factor, times_share, without_outer_tape
from hvdkit.collectives.conversion import graph_safe
from hvdkit.collectives.process_sets import RankGroup, resolve
from hvdkit.errors import describe
from hvdkit.optimizer.coupled_layers import note_coupled, require_synchronized

_Layer = keras.layers.BatchNormalization


def synchronize_batch_normalization(
    model: keras.layers.Layer, *, process_set: RankGroup = None
) -> list[keras.layers.BatchNormalization]:
    """Make every ``BatchNormalization(synchronized=True)`` of ``model`` use the statistics of the global batch.

    Keras synchronizes through ``tf.distribute``, which sees only one rank, and so uses the local batch. ``hk.fit``,
    ``BroadcastInitial``, ``MetricAverage`` and ``hk.Supervisor`` call this function. Users of a custom training loop
    call it once, before the first step.

    With x_i the n unmasked elements of a channel on all ranks with different batches:

        mean = sum_i x_i / n,    variance = sum_i (x_i - mean)^2 / n

    Each layer takes one allreduce of ``[n_r, sum x, sum x^2]`` in the forward pass, and one of the gradients of these
    sums in the backward pass. Ranks may have any number of examples, including 0. The sums are computed from deviations
    from the local mean and added in float64 (Chan, Golub and LeVeque, "Algorithms for computing the sample variance",
    The American Statistician 37, 1983): with float32 inputs the variance is as accurate as in a single process.
    Gradients are those of the global function if ranks' losses are summed or averaged; pass weights of ranks as
    ``weight`` to ``hk.DistributedGradientTape``, not to ``hk.average_gradients``.

    Args:
        model: a Keras model or layer whose layers exist. The layers keep their class: a saved model loads without
            hvdkit, and a loaded one must be synchronized again.
        process_set: the ranks that train the model together; default: those along the mesh's axis "data", or the
            previous ones if the layers are already synchronized.

    Returns:
        The synchronized layers.

    Raises:
        ValueError: a layer's class overrides the computation of statistics.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(synchronized=True)])
        >>> layers = hk.layers.synchronize_batch_normalization(model)
        >>> y = model(np.float32([[hk.rank()]]), training=True)  # one example per rank: 0, 1, ...
        >>> round(float(layers[0].moving_mean[0]), 4) == round(0.01 * (hk.size() - 1) / 2, 4)  # 1% of their mean
        True
    """
    group = resolve(process_set)
    layers = [layer for layer in _batch_normalizations(model) if layer.synchronized]
    for layer in layers:
        if "_moments" in vars(layer) and group is None:
            continue
        if type(layer)._moments is not _Layer._moments:
            got = f"layer {layer.name!r}, whose class {type(layer).__name__} has its own _moments"
            remedy = "pass synchronized=False, or use Keras's class"
            raise ValueError(describe("synchronized", got, "keras.layers.BatchNormalization's own statistics", remedy))
        # Bypass Keras's __setattr__, which would track it.
        object.__setattr__(layer, "_moments", partial(_moments, layer, group))
        note_coupled(layer)
    return layers


def synchronized_statistics(model: keras.layers.Layer) -> list[keras.Variable]:
    """Return the moving statistics of synchronized layers: equal on all ranks, even on a rank without examples."""
    layers = [layer for layer in _batch_normalizations(model) if "_moments" in vars(layer)]
    return [v for layer in layers for v in layer.non_trainable_variables]


def check_batch_normalization(model: keras.layers.Layer) -> None:
    """Raise ValueError if a layer with ``synchronized=True`` is not synchronized, and there are several ranks."""
    for layer in _batch_normalizations(model):
        require_synchronized(layer)


def warn_of_local_statistics(model: keras.layers.Layer) -> None:
    """Warn on the chief, once for the same layers, that their statistics are local, unlike those of one process."""
    local = [each.name for each in _batch_normalizations(model) if each.trainable and not each.synchronized]
    if local and cluster.is_chief() and cluster.group(cluster.DATA).size > 1:
        names = ", ".join(local[:3]) + (", ..." if len(local) > 3 else "")
        warn_once(
            f"BatchNormalization ({names}): normalizes by each rank's rows, not by the global batch; use "
            "synchronized=True for the results of one process"
        )


def average_moving_statistics(model: keras.layers.Layer | None, *, process_set: RankGroup = None) -> None:
    """Average the moving statistics of ``model``'s BatchNormalization layers over the ranks with different batches.

    Without ``synchronized=True`` they follow each rank's examples; their average is used to evaluate, save and export.
    Every rank calls it. It costs one grouped allreduce, or nothing if all layers are synchronized.

    Args:
        model: a built Keras model or layer, the same on every rank; or None.
        process_set: as for ``hk.layers.synchronize_batch_normalization``.

    Raises:
        CollectiveMismatchError: ranks have different models.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
        >>> y = model(np.full((8, 1), hk.rank(), "float32"), training=True)  # each rank has its own mean
        >>> hk.layers.average_moving_statistics(model)
        >>> digest = hk.compare_variables(model.variables)  # equal on all ranks: evaluate, save or export now
    """
    average_temporarily(model, process_set=process_set)


def average_temporarily(
    model: keras.layers.Layer | None, *, process_set: RankGroup = None
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Like :func:`average_moving_statistics`; return the variables with their previous values, to restore them."""
    layers = [] if model is None else _batch_normalizations(model)
    group = resolve(process_set) or cluster.group(cluster.DATA)
    moving = [v for layer in layers if "_moments" not in vars(layer) for v in layer.non_trainable_variables]
    if not moving or group.size == 1:
        return []
    local = [tf.identity(v) for v in moving]
    # float64, so that the mean of equal values is bitwise equal to them.
    means = grouped_allreduce([tf.cast(x, tf.float64) for x in local], Average, process_set=group)
    for variable, mean in zip(moving, means, strict=True):
        variable.assign(tf.cast(mean, variable.dtype))
    return list(zip(moving, local, strict=True))


def _batch_normalizations(model: keras.layers.Layer) -> list[keras.layers.BatchNormalization]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, _Layer)]


@graph_safe
def _moments(
    layer: keras.layers.BatchNormalization, group: cluster.Group | None, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Replace a layer's ``_moments``."""
    group = cluster.group(cluster.DATA) if group is None else group
    return global_moments(tf.convert_to_tensor(inputs), layer._reduction_axes, mask, group)


def global_moments(
    x: tf.Tensor, axes: list[int], mask: tf.Tensor | None, group: cluster.Group
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance of ``x`` along ``axes``, over the examples of all ranks of ``group``.

    Args:
        x: float tensor, the local batch; any number of rows.
        axes: all axes except the channel axis.
        mask: the elements to include; its shape is that of ``x`` without the last axis, or broadcastable to it. None
            includes all.
        group: the ranks; each has its own batch.

    Returns:
        Two tensors ``[channels]`` of the dtype of ``x``, equal on all ranks; 0 if all elements are masked.
    """
    kept = None if mask is None else tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(x))

    def summed(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values if kept is None else tf.where(kept, values, tf.zeros_like(x)), axes)

    if kept is None:
        count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), axes)), tf.float64)
    else:
        count = tf.cast(tf.math.count_nonzero(kept, axes), tf.float64)
    # For any constant c, with d = x - c:  sum x = sum d + n c,  sum x^2 = sum d^2 + 2 c sum d + n c^2.
    # With c the rounded local mean, the sums over d are free of cancellation.
    constant = tf.stop_gradient(summed(x) / tf.cast(tf.maximum(count, 1.0), x.dtype))
    deviations = x - tf.reshape(constant, [1 if axis in axes else -1 for axis in range(len(x.shape))])
    sums = [tf.cast(summed(each), tf.float64) for each in (deviations, tf.square(deviations))]
    c = tf.cast(constant, tf.float64)
    local = [tf.broadcast_to(count, tf.shape(c)), sums[0] + count * c, sums[1] + c * (2.0 * sums[0] + count * c)]
    count, total, squares = tf.unstack(_sum_over_ranks(tf.stack(local), gradient_factor(), group))
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)


def _sum_over_ranks(local: tf.Tensor, factor: tf.Tensor | None, group: cluster.Group) -> tf.Tensor:
    """Return the sum of ``local`` over ranks, with the gradient of the average of the ranks' weighted losses.

    With f_r the factor of rank r's loss (:func:`hvdkit.collectives.batch_share.share_of_batch`) and u_r its gradient
    with respect to the sum, the gradient of ``local`` is sum_q f_q u_q / f_r, because rank r's gradients are later
    multiplied by f_r. A rank with factor 0 computes on filler examples, which are excluded.
    """
    if factor is None:
        return allreduce(local, Sum, process_set=group)
    weight = tf.cast(factor, local.dtype)

    @tf.custom_gradient
    def call(values: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            checked = tf.cast(without_outer_tape(factor, "synchronized", "BatchNormalization"), local.dtype)
            return tf.math.divide_no_nan(allreduce(times_share(upstream, checked), Sum, process_set=group), checked)

        return allreduce(times_share(values, tf.sign(weight)), Sum, process_set=group), gradient

    return call(local)
