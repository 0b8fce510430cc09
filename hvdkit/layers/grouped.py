"""Differentiable exchanges along one axis of the mesh, among ranks that work on one batch together.

Each is the other way round for gradients (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3): what every rank
of the group holds alike has a gradient that is the sum of theirs.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.cluster import Group
from hvdkit.collectives import tensors
from hvdkit.collectives.ops import ReduceOp
from hvdkit.partition import rows_of


def shared_by(x: tf.Tensor, group: Group) -> tf.Tensor:
    """Return ``x``, which all ranks of the group hold alike and use differently; its gradient is summed over them."""

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda upstream: sum_over(upstream, group, "hvdkit.shared")

    return forward(x)


def added_up(x: tf.Tensor, group: Group) -> tf.Tensor:
    """Return the sum of ``x`` over the group, which all of its ranks then use alike."""

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        return sum_over(x, group, "hvdkit.added"), lambda upstream: upstream

    return forward(x)


def beside(x: tf.Tensor, width: int, group: Group) -> tf.Tensor:
    """Put the ranks' columns ``[..., local]`` beside each other, ``[..., width]``; all ranks then use them alike."""
    mine = rows_of("div", width, group.index, group.size)

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        flat = tf.transpose(tf.reshape(x, [-1, len(mine)]))
        gathered = tf.transpose(tensors.allgather(flat, "hvdkit.beside", group))
        whole = tf.reshape(gathered, tf.concat([tf.shape(x)[:-1], [width]], 0))
        return whole, lambda upstream: upstream[..., mine.start : mine.stop]

    return forward(x)


def sum_of_parts(x: tf.Tensor) -> tf.Tensor:
    """Return the sum over all ranks of ``x``, which each rank computes from its own part of something larger.

    Every rank's loss depends on every part, so that the gradient is the sum of theirs.
    """

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        total = sum_over(x, None, "hvdkit.parts")
        return total, lambda upstream: sum_over(upstream, None, "hvdkit.parts.gradient")

    return forward(x)


def sum_over(x: tf.Tensor, group: Group | None, name: str) -> tf.Tensor:
    """Return the sum of ``x`` over the group; None: over all ranks."""
    return tensors.grouped_allreduce([x], ReduceOp.Sum, name, group)[0]


def largest_over(x: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Return the maximum of ``x`` over the group."""
    return tensors.grouped_allreduce([x], ReduceOp.Max, name, group)[0]
