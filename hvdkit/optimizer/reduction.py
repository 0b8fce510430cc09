"""What a distributed optimizer does to gradients before Keras sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.ops import ReduceOp
from hvdkit.collectives.shards import shard_of
from hvdkit.collectives.tensors import grouped_allreduce
from hvdkit.gradients import average_gradients
from hvdkit.gradients.average import divide_shards, mapped
from hvdkit.gradients.sparse import sum_duplicates
from hvdkit.optimizer.rows import SparseUpdates


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """What a distributed optimizer does to gradients before Keras sees them."""

    op: ReduceOp
    compression: str | None
    accumulate_steps: int
    clip_global_norm: float | None
    sparse_updates: SparseUpdates = "auto"
    combines: bool = True

    def combine(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Combine ``grads`` of ``variables`` over all ranks."""
        if not self.combines:
            return list(grads)

        def average(replicated: list[Any]) -> list[Any]:
            return average_gradients(replicated, op=self.op, compression=self.compression)

        # Rows of shards may be there several times: whether they have to be distinct, the update knows.
        return divide_shards(grads, [shard_of(v) is not None for v in variables], self.op, average)

    def share(self, grads: Sequence[Any], variables: Sequence[Any], *, undo: bool = False) -> list[Any]:
        """Divide gradients of shards by N before they are added up over steps: then sums mean the same at any N."""
        if self.op != ReduceOp.Average or cluster.size() == 1:
            return list(grads)
        factor = cluster.size() if undo else 1 / cluster.size()
        pairs = zip(grads, variables, strict=True)
        return [g if shard_of(v) is None else mapped(g, lambda x: x * factor) for g, v in pairs]

    def clip(self, grads: Sequence[Any], variables: Sequence[Any], loss_scale: float | None = None) -> list[Any]:
        """Scale all gradients so that their global norm is at most the limit.

        A replicated gradient counts once; of a sharded one every rank has its own rows, whose squares are summed.
        """
        if self.clip_global_norm is None:
            return list(grads)
        limit = self.clip_global_norm * (loss_scale or 1.0)
        own = [g is not None and shard_of(v) is not None for g, v in zip(grads, variables, strict=True)]
        if not any(own):
            return tf.clip_by_global_norm(list(grads), limit)[0]
        distinct = [sum_duplicates(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        squares = _squares([g for g, sharded in zip(distinct, own, strict=True) if sharded])
        if cluster.size() > 1:
            squares = grouped_allreduce([squares], ReduceOp.Sum, "hvdkit.norm")[0]
        squares += _squares([g for g, sharded in zip(distinct, own, strict=True) if not sharded])
        return tf.clip_by_global_norm(distinct, limit, use_norm=tf.sqrt(squares))[0]


def _squares(grads: Sequence[Any]) -> tf.Tensor:
    present = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    return tf.add_n([tf.constant(0.0), *(tf.cast(tf.reduce_sum(tf.square(g)), tf.float32) for g in present)])
