"""How gradients are combined over ranks, and processed before Keras's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy.typing as npt
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.ops import Average, ReduceOp
from hvdkit.collectives.tensors import grouped_allreduce
from hvdkit.optimizer.gradients import Gradient, Kind, PlacedGradients, map_values
from hvdkit.optimizer.row_updates import SparseUpdates
from hvdkit.optimizer.sparse import sum_duplicates
from hvdkit.sharding.shards import shard_of


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How gradients are combined over ranks, and how a distributed optimizer processes them before Keras's update.

    Attributes:
        op, weight, compression: as for ``hk.average_gradients``, not checked yet.
        group: the ranks that combine them; None for all.
        model: which of the models this is that these ranks have trained.
        combines: False if gradients are already combined, by the tape or by a LossScaleOptimizer around the optimizer.
        reduced: if already combined, whether they are only this rank's elements.
        accumulate_steps, clip_global_norm, sparse_updates, shard_states: as for ``hk.DistributedOptimizer``.
    """

    op: ReduceOp = Average
    weight: npt.ArrayLike | tf.Tensor | None = None
    compression: str | None = None
    group: cluster.Group | None = None
    model: int = 1
    combines: bool = True
    reduced: bool = False
    accumulate_steps: int = 1
    clip_global_norm: float | None = None
    sparse_updates: SparseUpdates = "auto"
    shard_states: bool = False

    @property
    def name(self) -> str:
        """Name by which ranks match the gradients of one model."""
        return "hvdkit.gradients" if self.model == 1 else f"hvdkit.gradients.{self.model}"

    @property
    def call_site(self) -> str:
        """Name of this optimizer for the profiler, which counts its combinations as steps."""
        return f"optimizer {id(self)}"

    @property
    def batch_group(self) -> cluster.Group:
        """The ranks that have different batches: those along the mesh axis "data", or all of ``group``."""
        return cluster.group(cluster.DATA) if self.group is None else self.group

    @property
    def ranks_per_batch(self) -> int:
        """Number of ranks that share each batch."""
        return cluster.size() // self.batch_group.size if self.group is None else 1

    def divide_rows(self, placed: PlacedGradients, *, undo: bool = False) -> PlacedGradients:
        """Divide the gradients of rows by N before they are accumulated, so that their sums don't depend on N."""
        divisor = cluster.size() if self.op == ReduceOp.Average else self.ranks_per_batch
        factor = divisor if undo else 1 / divisor
        if divisor == 1:
            return placed
        return placed.map(lambda grad, kind: map_values(grad, lambda x: x * factor) if kind == "rows" else grad)

    def clip(
        self, placed: PlacedGradients, loss_scale: float | None = None, *, divided: bool = False
    ) -> PlacedGradients:
        """Scale all gradients so that their global norm is at most the limit.

        A replicated gradient counts once. The squares of sharded and local gradients are summed over ranks, as are
        those of replicated gradients if they are ``divided`` among ranks.
        """
        if self.clip_global_norm is None:
            return placed
        limit = self.clip_global_norm * (loss_scale or 1.0)
        distinct = placed.map(lambda grad, _: sum_duplicates(grad))
        norm = tf.sqrt(tf.add_n(self._squares_by_group(distinct, divided)))
        # A norm that is not finite makes all gradients NaN.
        factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)

        def scale(grad: Gradient, kind: Kind) -> Gradient:
            return grad if kind == "overwritten" else map_values(grad, lambda x: x * tf.cast(factor, x.dtype))

        return distinct.map(scale)

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
