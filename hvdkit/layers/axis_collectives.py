"""Differentiable collectives along one mesh axis, among ranks that process the same batch.

The gradient of each is its conjugate (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3): the gradient of a
replicated tensor is the sum of the gradients over the group.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hvdkit.cluster import Group
from hvdkit.collectives import tensors
from hvdkit.collectives.ops import ReduceOp, Sum
from hvdkit.sharding.partition import rows_of


def copy_to_group(x: tf.Tensor, group: Group) -> tf.Tensor:
    """Return ``x``, which is the same on all ranks of the group but used differently by each; sum its gradient."""
    return _with_gradient(x, tf.identity, lambda upstream: reduce_over(upstream, Sum, group, "hvdkit.shared"))


def reduce_from_group(x: tf.Tensor, group: Group) -> tf.Tensor:
    """Return the sum of ``x`` over the group. All ranks of the group must use it identically."""
    return _with_gradient(x, lambda x: reduce_over(x, Sum, group, "hvdkit.added"), lambda upstream: upstream)


def gather_columns(x: tf.Tensor, width: int, group: Group) -> tf.Tensor:
    """Concatenate the ranks' columns ``[..., local]`` to ``[..., width]``. All ranks must use these identically."""
    columns = rows_of("div", width, group.index, group.size)

    def gather(x: tf.Tensor) -> tf.Tensor:
        flat = tf.transpose(tf.reshape(x, [-1, len(columns)]))
        gathered = tf.transpose(tensors.allgather(flat, "hvdkit.beside", group))
        return tf.reshape(gathered, tf.concat([tf.shape(x)[:-1], [width]], 0))

    return _with_gradient(x, gather, lambda upstream: upstream[..., columns.start : columns.stop])


def sum_parts(x: tf.Tensor) -> tf.Tensor:
    """Return the sum over all ranks of ``x``, which each rank computes from its part of a sharded tensor.

    Every rank's loss depends on every part, so the gradient is summed over ranks.
    """

    def total(x: tf.Tensor) -> tf.Tensor:
        return reduce_over(x, Sum, None, "hvdkit.parts")

    return _with_gradient(x, total, lambda upstream: reduce_over(upstream, Sum, None, "hvdkit.parts.gradient"))


def reduce_over(x: tf.Tensor, op: ReduceOp, group: Group | None, name: str) -> tf.Tensor:
    """Reduce ``x`` over the group; None: over all ranks."""
    return tensors.grouped_allreduce([x], op, name, group)[0]


def _with_gradient(
    x: tf.Tensor, forward: Callable[[tf.Tensor], tf.Tensor], backward: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Return ``forward(x)``, whose gradient is ``backward`` of the upstream gradient."""
    return tf.custom_gradient(lambda x: (forward(x), backward))(x)
