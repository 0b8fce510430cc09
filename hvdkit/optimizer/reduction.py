"""Gradient processing of a distributed optimizer before Keras's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.ops import ReduceOp
from hvdkit.collectives.tensors import grouped_allreduce
from hvdkit.optimizer.average import Averaging, agree_on, combine, map_values, scale_to_batch
from hvdkit.optimizer.gradients import Gradient, Kind, PlacedGradients
from hvdkit.optimizer.row_updates import SparseUpdates
from hvdkit.optimizer.sparse import sum_duplicates
from hvdkit.optimizer.step_reports import report_step
from hvdkit.sharding.shards import shard_of


@dataclass(frozen=True, kw_only=True)
class Reduction(Averaging):
    """How a distributed optimizer processes gradients before Keras's update.

    Attributes:
        combines: False if gradients are already combined, by the tape or by a LossScaleOptimizer around the optimizer.
        reduced: if already combined, whether they are only this rank's elements.
        accumulate_steps, clip_global_norm, sparse_updates, shard_states: as for ``hk.DistributedOptimizer``.
    """

    accumulate_steps: int = 1
    clip_global_norm: float | None = None
    sparse_updates: SparseUpdates = "auto"
    shard_states: bool = False
    combines: bool = True
    reduced: bool = False

    def agree(self, prepare: Callable[[], PlacedGradients], *, exchanges: bool = False) -> PlacedGradients:
        """Return the result of ``prepare``, compared between ranks if they will combine it.

        Args:
            prepare: does everything that can raise before gradients are exchanged; may itself exchange objects, as in
                the first step of ``fit``.
            exchanges: whether the step contains another exchange, so that a rank must not raise alone.
        """
        return agree_on(prepare, self, compares=self.combines) if self.combines or exchanges else prepare()

    def scale_to_batch(self, placed: PlacedGradients) -> PlacedGradients:
        """Return gradients multiplied by this rank's share of the global batch, if they will be combined here."""
        return scale_to_batch(placed, self) if self.combines else placed

    def combine(self, placed: PlacedGradients) -> list[Gradient]:
        """Combine gradients over all ranks, after :meth:`agree`.

        Rows of shards may repeat; the update sums duplicates where necessary.
        """
        if not self.combines:
            return placed.grads
        combined = combine(placed, self)
        report_step(combined, f"optimizer {id(self)}")
        return combined

    def divide_rows(self, placed: PlacedGradients, *, undo: bool = False) -> PlacedGradients:
        """Divide the gradients of rows by N before they are accumulated, so that their sums don't depend on N."""
        divisor = cluster.size() if self.op == ReduceOp.Average else self.ranks_per_batch
        factor = divisor if undo else 1 / divisor
        if divisor == 1:
            return placed
        return placed.map(lambda grad, kind: map_values(grad, lambda x: x * factor) if kind == "rows" else grad)

    def clip(
        self, placed: PlacedGradients, loss_scale: float | None = None, *, divided: bool = False
    ) -> list[Gradient]:
        """Scale all gradients so that their global norm is at most the limit.

        A replicated gradient counts once. The squares of sharded and local gradients are summed over ranks, as are
        those of replicated gradients if they are ``divided`` among ranks.
        """
        if self.clip_global_norm is None:
            return placed.grads
        limit = self.clip_global_norm * (loss_scale or 1.0)
        distinct = placed.map(lambda grad, _: sum_duplicates(grad))
        norm = tf.sqrt(tf.add_n(self._squares_by_group(distinct, divided)))
        # A norm that is not finite makes all gradients NaN.
        factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)

        def scale(grad: Gradient, kind: Kind) -> Gradient:
            return grad if kind == "overwritten" else map_values(grad, lambda x: x * tf.cast(factor, x.dtype))

        return distinct.map(scale).grads

    def _squares_by_group(self, placed: PlacedGradients, divided: bool) -> list[tf.Tensor]:
        """Return sums of squares: of replicated gradients, of shards and local gradients, and of parts by mesh axis."""
        replicated: list[Gradient] = []
        by_axis: dict[str | None, list[Gradient]] = {}
        for grad, variable, kind in zip(placed.grads, placed.variables, placed.kinds, strict=True):
            if kind == "replicated" and not divided:
                replicated.append(grad)
            elif kind != "overwritten":
                axis = shard.axis if kind == "part" and (shard := shard_of(variable)) is not None else None
                by_axis.setdefault(axis, []).append(grad)
        totals = [_squares(replicated)]
        for axis, grads_of_axis in by_axis.items():
            group = self.group if axis is None else cluster.group(axis)
            totals += grouped_allreduce([_squares(grads_of_axis)], ReduceOp.Sum, f"hvdkit.norm_{axis or 'rows'}", group)
        return totals


def _squares(grads: Sequence[Gradient]) -> tf.Tensor:
    present = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
    squares = [tf.cast(tf.reduce_sum(tf.square(g)), tf.float64) for g in present]
    return tf.add_n([tf.constant(0.0, tf.float64), *squares])
