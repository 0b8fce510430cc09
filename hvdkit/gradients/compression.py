"""What gradients look like on the wire: as they are, or in 16 bits.

``"fp16"`` halves the bytes and is summed in float16 by Horovod's own ring. Horovod does not sum bfloat16, so ``"bf16"``
is a ring of its own two halves: every rank gets its share of all vectors (alltoall), sums it in float32, rounds
once, and all shares are gathered. It moves the same 2 (N-1)/N bytes per byte of gradient. The first half alone,
:func:`reduce_scatter`, is what ranks need that divide an optimizer's slots among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.settings import bucket_bytes
from hvdkit.collectives import tensors
from hvdkit.collectives.ops import ReduceOp
from hvdkit.errors import describe
from hvdkit.planning.buckets import buckets

_WIRES = {"fp16": tf.float16, "bf16": tf.bfloat16}


def wire_dtype(compression: str | None) -> tf.DType | None:
    """Return the dtype in which ``compression`` sends floats, None for their own.

    Raises:
        ValueError: ``compression`` is neither None, ``"fp16"`` nor ``"bf16"``.
    """
    if compression is None:
        return None
    if not isinstance(compression, str) or compression not in _WIRES:
        raise ValueError(describe("compression", compression, "None, 'fp16' or 'bf16'", "pass one of these three"))
    return _WIRES[compression]


def dtype_on_wire(dtype: tf.DType, wire: tf.DType | None) -> tf.DType:
    """Return the dtype in which values of ``dtype`` travel.

    Only float32 and float64 are compressed: what is 16 bits wide already would lose precision or range.
    """
    return wire if wire is not None and dtype in (tf.float32, tf.float64) else dtype


def reduce_dense(
    grads: Sequence[tf.Tensor], op: ReduceOp, wire: tf.DType | None, name: str, group: cluster.Group | None = None
) -> list[tf.Tensor]:
    """Return each dense gradient combined over all ranks (or ``group``) by ``op``, Average or Sum, in its own dtype.

    Gradients go out in buckets, those of the last variables first: the backward pass computes them first, and goes on
    while they travel.
    """
    results: dict[int, tf.Tensor] = {}
    nbytes = [(g.shape.num_elements() or 0) * dtype_on_wire(g.dtype, wire).size for g in grads]
    for number, places in enumerate(buckets(nbytes, bucket_bytes())):
        each = name if number == 0 else f"{name}_{number}"
        results |= zip(places, _reduce_bucket([grads[i] for i in places], op, wire, each, group), strict=True)
    return [results[i] for i in range(len(grads))]


def _reduce_bucket(
    grads: Sequence[tf.Tensor], op: ReduceOp, wire: tf.DType | None, name: str, group: cluster.Group | None
) -> list[tf.Tensor]:
    narrowed = [dtype_on_wire(g.dtype, wire) != g.dtype for g in grads]
    if wire != tf.bfloat16:
        sent = [tf.cast(g, dtype_on_wire(g.dtype, wire)) for g in grads]
        reduced = tensors.grouped_allreduce(sent, op, name, group)
        return [tf.cast(y, g.dtype) for y, g in zip(reduced, grads, strict=True)]
    ours = [g for g, narrow in zip(grads, narrowed, strict=True) if narrow]
    rest = [g for g, narrow in zip(grads, narrowed, strict=True) if not narrow]
    compressed = iter(_reduce_bf16(ours, op, name, group))
    plain = iter(tensors.grouped_allreduce(rest, op, name, group))
    return [next(compressed) if narrow else next(plain) for narrow in narrowed]


def _reduce_bf16(grads: list[tf.Tensor], op: ReduceOp, name: str, group: cluster.Group | None) -> list[tf.Tensor]:
    if not grads:
        return []
    size = cluster.size() if group is None else group.size
    flat = tf.concat([tf.reshape(tf.cast(g, tf.bfloat16), [-1]) for g in grads], axis=0)
    padded = tf.pad(flat, [[0, -tf.size(flat) % size]])
    mine = reduce_scatter(padded, op, None, f"{name}_bf16", group=group)
    whole = tensors.allgather(mine, f"{name}_bf16_gather", group)[: tf.size(flat)]
    parts = tf.split(whole, [tf.size(g) for g in grads], num=len(grads))
    return [tf.cast(tf.reshape(p, tf.shape(g)), g.dtype) for p, g in zip(parts, grads, strict=True)]


def reduce_scatter(
    flat: tf.Tensor,
    op: ReduceOp,
    wire: tf.DType | None,
    name: str,
    *,
    group: cluster.Group | None = None,
    native: bool | None = None,
) -> tf.Tensor:
    """Return this rank's share of vectors combined over all ranks (or ``group``) by ``op``, Average or Sum.

    Over a network by Horovod's reducescatter. Within one host each rank gets its share of all vectors (alltoall), and
    adds it up in rank order: the same (N-1)/N bytes without the loops of ``MPI_Reduce_scatter``, which through shared
    memory take several times as long as TensorFlow's.

    Args:
        flat: ``[N * k]`` floats, of one dtype and length on every rank.
        op: the reduction.
        wire: the dtype in which 32- and 64-bit floats travel; None for their own.
        name: of the exchange.
        group: its N ranks, if they are not all.
        native: by Horovod's op, or by alltoall, which bfloat16 always takes; None: as described above.

    Returns:
        ``[k]``, rank r's those that begin at ``r * k``, in the dtype of ``flat``.
    """
    sent = tf.cast(flat, dtype_on_wire(flat.dtype, wire))
    if native is None:
        native = len(set(cluster.cluster().hosts)) > 1
    if native and sent.dtype != tf.bfloat16:
        return tf.cast(tensors.reducescatter(sent, op, f"{name}_scatter", group), flat.dtype)
    size = cluster.size() if group is None else group.size
    share = tf.size(flat) // size
    received, _ = tensors.alltoall(sent, tf.fill([size], share), f"{name}_scatter", group)
    added = flat.dtype if flat.dtype.size > 2 else tf.float32
    total = tf.reduce_sum(tf.cast(tf.reshape(received, [size, share]), added), axis=0)
    return tf.cast(total / size if op == ReduceOp.Average else total, flat.dtype)
