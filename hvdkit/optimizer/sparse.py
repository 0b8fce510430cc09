"""Combine sparse gradients: sum them locally by row, then send rows or a dense tensor, whichever is smaller.

With V rows of D numbers of b bytes, and u_r distinct rows on rank r, each rank receives

    dense ring allreduce   2 (N-1)/N * V * D * b        bytes
    allgather of rows        (N-1)/N * sum_r u_r * (D * b + i)   bytes, i = bytes of an index

(the ring bound: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69, 2009). The sum of the u_r is only known at run time, and all ranks must make the same
choice, so the counts of all sparse gradients are summed over ranks in one small exchange. Tables whose dense form is
tiny are always sent dense, without counting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import tensors
from hvdkit.collectives.ops import ReduceOp
from hvdkit.optimizer.compression import dtype_on_wire, reduce_dense

T = TypeVar("T")
# Below this size, a dense exchange is cheaper than the exchange of counts.
TINY_DENSE_BYTES = 64 * 1024


class DividedRows(tf.IndexedSlices):
    """Rows divided by a number. Keeps the undivided values, so that an update can divide its learning rate instead.

    Attributes:
        undivided: the undivided values, ``[k, ...]``.
        divisor: the divisor.
    """

    def __init__(self, rows: tf.IndexedSlices, divisor: int):
        super().__init__(rows.values / divisor, rows.indices, rows.dense_shape)
        self.undivided = rows.values
        self.divisor = divisor


def sum_duplicates(grad: T) -> T:
    """Sum the values of duplicate rows of IndexedSlices; return a dense gradient or None unchanged.

    Args:
        grad: indices [k] int32 or int64, in any order, may repeat; values [k, ...].

    Returns:
        indices [u], distinct and in the order of first appearance; values [u, ...]; the same dense_shape.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    indices, position = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, position, tf.size(indices))
    summed: T = tf.IndexedSlices(values, indices, grad.dense_shape)
    return summed


def dense_shape(grad: tf.IndexedSlices) -> tuple[int, ...] | None:
    """Return the shape of the variable of ``grad`` if it is statically known, else None."""
    if grad.dense_shape is None:
        return None
    known = tf.get_static_value(grad.dense_shape)
    return None if known is None else tuple(int(n) for n in known)


def is_tiny(grad: tf.IndexedSlices) -> bool:
    """Return True if the dense form of ``grad`` is known to be tiny."""
    shape = dense_shape(grad)
    return shape is not None and tf.TensorShape(shape).num_elements() * grad.values.dtype.size <= TINY_DENSE_BYTES


def combine(
    grads: Sequence[tf.IndexedSlices],
    op: ReduceOp,
    wire: tf.DType | None,
    name: str,
    group: cluster.Group | None = None,
) -> list[tf.IndexedSlices]:
    """Return each sparse gradient combined over all ranks by ``op``, Average or Sum, as rows without duplicates.

    Args:
        grads: one per variable, without duplicates; rows and their number may differ between ranks.
        op, wire, name, group: as for :func:`hvdkit.optimizer.compression.reduce_dense`.
    """
    if not grads:
        return []
    counts = tf.stack([tf.size(g.indices, out_type=tf.int64) for g in grads])
    totals = tensors.grouped_allreduce([counts], ReduceOp.Sum, f"{name}.sparse_counts", group)[0]
    return [_combine_one(g, totals[i], op, wire, i, group) for i, g in enumerate(grads)]


def _combine_one(
    grad: tf.IndexedSlices,
    total: tf.Tensor,
    op: ReduceOp,
    wire: tf.DType | None,
    number: int,
    group: cluster.Group | None,
) -> tf.IndexedSlices:
    shape = dense_shape(grad)
    dtype = grad.values.dtype
    indices_dtype = grad.indices.dtype
    sent = dtype_on_wire(dtype, wire)
    size = cluster.size() if group is None else group.size

    def as_rows() -> tuple[tf.Tensor, tf.Tensor]:
        values = grad.values / tf.cast(size, dtype) if op == ReduceOp.Average else grad.values
        gathered = tensors.allgather(tf.cast(values, sent), f"hvdkit.sparse_values_{number}", group)
        indices = tensors.allgather(grad.indices, f"hvdkit.sparse_indices_{number}", group)
        rows = sum_duplicates(tf.IndexedSlices(tf.cast(gathered, dtype), indices))
        return rows.indices, rows.values

    def as_dense(shape: tuple[int, ...]) -> tuple[tf.Tensor, tf.Tensor]:
        dense = tf.scatter_nd(grad.indices[:, None], grad.values, tf.constant(shape, indices_dtype))
        reduced = reduce_dense([dense], op, wire, f"hvdkit.sparse_dense_{number}", group)[0]
        return tf.range(shape[0], dtype=indices_dtype), reduced

    if shape is None:
        indices, values = as_rows()
    else:
        width = tf.TensorShape(shape[1:]).num_elements()
        rows_bytes = total * (width * sent.size + indices_dtype.size)
        cheaper_dense = rows_bytes > 2 * shape[0] * width * sent.size
        indices, values = tf.cond(cheaper_dense, lambda: as_dense(shape), as_rows)
    values.set_shape([None, *grad.values.shape[1:]])
    return tf.IndexedSlices(values, indices, grad.dense_shape)
