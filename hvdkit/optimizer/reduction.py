"""What a distributed optimizer does to gradients before Keras sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.ops import ReduceOp
from hvdkit.collectives.shards import Shard, shard_of
from hvdkit.collectives.tensors import grouped_allreduce
from hvdkit.gradients import average_gradients
from hvdkit.gradients.average import combine_kinds, copies, mapped
from hvdkit.gradients.sparse import sum_duplicates
from hvdkit.gradients.steps import tell_profile
from hvdkit.optimizer.rows import SparseUpdates


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """What a distributed optimizer does to gradients before Keras sees them.

    Attributes:
        combines: False where they come combined: from the tape, or from a loss scale around the optimizer.
        reduced: then True where they come as this rank's elements, and not whole.
        others: as for ``hk.DistributedOptimizer``.
    """

    op: ReduceOp
    compression: str | None
    accumulate_steps: int
    clip_global_norm: float | None
    sparse_updates: SparseUpdates = "auto"
    shard_states: bool = False
    combines: bool = True
    reduced: bool = False

    def combine(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Combine ``grads`` of ``variables`` over all ranks."""
        if not self.combines:
            return list(grads)

        def average(replicated: list[Any]) -> list[Any]:
            return average_gradients(replicated, op=self.op, compression=self.compression)

        # Rows of shards may be there several times: whether they have to be distinct, the update knows.
        combined = combine_kinds(grads, [shard_of(v) for v in variables], self.op, average)
        tell_profile(combined, f"optimizer {id(self)}")
        return combined

    def share(self, grads: Sequence[Any], variables: Sequence[Any], *, undo: bool = False) -> list[Any]:
        """Divide gradients of shards by N before they are added up over steps: then sums mean the same at any N."""
        divisor = cluster.size() if self.op == ReduceOp.Average else copies()
        factor = divisor if undo else 1 / divisor
        rows = [(shard := shard_of(v)) is not None and shard.axis is None for v in variables]
        pairs = zip(grads, rows, strict=True)
        return [mapped(g, lambda x: x * factor) if own and divisor > 1 else g for g, own in pairs]

    def clip(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        loss_scale: float | None = None,
        *,
        divided: bool = False,
    ) -> list[Any]:
        """Scale all gradients so that their global norm is at most the limit.

        A replicated gradient counts once; of a sharded one every rank has its own rows, whose squares are summed, and
        so are those of this rank's elements, where replicated gradients are ``divided`` among ranks.
        """
        if self.clip_global_norm is None:
            return list(grads)
        limit = self.clip_global_norm * (loss_scale or 1.0)
        distinct = [sum_duplicates(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        kinds = [_kind(shard_of(v), divided) for v in variables]
        norm = tf.sqrt(tf.add_n(_squares_by_kind(distinct, kinds)))
        # A norm that is not finite makes all gradients NaN.
        factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [mapped(g, lambda x: x * tf.cast(factor, x.dtype)) for g in distinct]


def _kind(shard: Shard | None, divided: bool) -> str | None:
    """Return "" for what every rank has whole, None for what is divided over all ranks, else the axis that it is."""
    if shard is None:
        return None if divided else ""
    return shard.axis


def _squares_by_kind(grads: Sequence[Any], kinds: Sequence[str | None]) -> list[tf.Tensor]:
    """Return the sum of squares of all replicated gradients, of all ranks' rows, and of the parts along each axis."""
    by_kind: dict[str | None, list[Any]] = {}
    for grad, kind in zip(grads, kinds, strict=True):
        by_kind.setdefault(kind, []).append(grad)
    totals = [_squares(by_kind.pop("", []))]
    for axis, own in by_kind.items():
        along = None if axis is None else cluster.group(axis)
        totals += grouped_allreduce([_squares(own)], ReduceOp.Sum, f"hvdkit.norm_{axis or 'rows'}", along)
    return totals


def _squares(grads: Sequence[Any]) -> tf.Tensor:
    present = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    squares = [tf.cast(tf.reduce_sum(tf.square(g)), tf.float64) for g in present]
    return tf.add_n([tf.constant(0.0, tf.float64), *squares])
