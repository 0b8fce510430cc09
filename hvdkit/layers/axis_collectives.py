"""Differentiable collectives along one mesh axis, among ranks that process the same batch.

The gradient of each is its conjugate (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3): the gradient of a
replicated tensor is the sum of the gradients over the group.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.cluster import Group
from hvdkit.collectives import tensors
from hvdkit.collectives.ops import ReduceOp
from hvdkit.sharding.partition import rows_of


def copy_to_group(x: tf.Tensor, group: Group) -> tf.Tensor:
    """Return ``x``, which is the same on all ranks of the group but used differently by each; sum its gradient."""

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda upstream: sum_over(upstream, group, "hvdkit.shared")

    return forward(x)


def reduce_from_group(x: tf.Tensor, group: Group) -> tf.Tensor:
    """Return the sum of ``x`` over the group. All ranks of the group must use it identically."""

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        return sum_over(x, group, "hvdkit.added"), lambda upstream: upstream

    return forward(x)


def gather_columns(x: tf.Tensor, width: int, group: Group) -> tf.Tensor:
    """Concatenate the ranks' columns ``[..., local]`` to ``[..., width]``. All ranks must use these identically."""
    columns = rows_of("div", width, group.index, group.size)

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        flat = tf.transpose(tf.reshape(x, [-1, len(columns)]))
        gathered = tf.transpose(tensors.allgather(flat, "hvdkit.beside", group))
        whole = tf.reshape(gathered, tf.concat([tf.shape(x)[:-1], [width]], 0))
        return whole, lambda upstream: upstream[..., columns.start : columns.stop]

    return forward(x)


def sum_parts(x: tf.Tensor) -> tf.Tensor:
    """Return the sum over all ranks of ``x``, which each rank computes from its part of a sharded tensor.

    Every rank's loss depends on every part, so the gradient is summed over ranks.
    """

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        total = sum_over(x, None, "hvdkit.parts")
        return total, lambda upstream: sum_over(upstream, None, "hvdkit.parts.gradient")

    return forward(x)


def sum_over(x: tf.Tensor, group: Group | None, name: str) -> tf.Tensor:
    """Return the sum of ``x`` over the group; None: over all ranks."""
    return tensors.grouped_allreduce([x], ReduceOp.Sum, name, group)[0]


def max_over(x: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Return the maximum of ``x`` over the group."""
    return tensors.grouped_allreduce([x], ReduceOp.Max, name, group)[0]
