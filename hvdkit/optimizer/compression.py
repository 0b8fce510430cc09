"""Wire format of gradients: uncompressed, or in 16 bits.

``"fp16"`` halves the bytes; Horovod's ring sums in float16. Horovod does not sum bfloat16, so ``"bf16"`` implements the
two halves of a ring itself: each rank receives its share of all vectors (alltoall), sums it in float32 and rounds once;
then all shares are gathered. It moves the same 2 (N-1)/N bytes per byte of gradient. Sharded optimizer state uses only
the first half, :func:`reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.settings import bucket_bytes
from hvdkit.collectives import tensors
from hvdkit.collectives.ops import ReduceOp
from hvdkit.errors import describe
from hvdkit.optimizer.buckets import buckets

_WIRES = {"fp16": tf.float16, "bf16": tf.bfloat16}


def wire_dtype(compression: str | None) -> tf.DType | None:
    """Return the wire dtype of ``compression``; None to send floats uncompressed.

    Raises:
        ValueError: ``compression`` is neither None, ``"fp16"`` nor ``"bf16"``.
    """
    if compression is None:
        return None
    if not isinstance(compression, str) or compression not in _WIRES:
        raise ValueError(describe("compression", compression, "None, 'fp16' or 'bf16'", "pass one of these three"))
    return _WIRES[compression]


def dtype_on_wire(dtype: tf.DType, wire: tf.DType | None) -> tf.DType:
    """Return the dtype in which values of ``dtype`` are sent.

    Only float32 and float64 are compressed: 16-bit dtypes would only lose precision or range.
    """
    return wire if wire is not None and dtype in (tf.float32, tf.float64) else dtype


def reduce_dense(
    grads: Sequence[tf.Tensor], op: ReduceOp, wire: tf.DType | None, name: str, group: cluster.Group | None = None
) -> list[tf.Tensor]:
    """Return each dense gradient combined over all ranks (or ``group``) by ``op``, Average or Sum, in its own dtype.

    Gradients are sent in buckets, starting with the last variables: the backward pass computes these first, and
    continues while they are exchanged.
    """
    results: dict[int, tf.Tensor] = {}
    nbytes = [(g.shape.num_elements() or 0) * dtype_on_wire(g.dtype, wire).size for g in grads]
    for number, indices in enumerate(buckets(nbytes, bucket_bytes())):
        each = name if number == 0 else f"{name}_{number}"
        results |= zip(indices, _reduce_bucket([grads[i] for i in indices], op, wire, each, group), strict=True)
    return [results[i] for i in range(len(grads))]


def _reduce_bucket(
    grads: Sequence[tf.Tensor], op: ReduceOp, wire: tf.DType | None, name: str, group: cluster.Group | None
) -> list[tf.Tensor]:
    narrowed = [dtype_on_wire(g.dtype, wire) != g.dtype for g in grads]
    if wire != tf.bfloat16:
        sent = [tf.cast(g, dtype_on_wire(g.dtype, wire)) for g in grads]
        reduced = tensors.grouped_allreduce(sent, op, name, group)
        return [tf.cast(y, g.dtype) for y, g in zip(reduced, grads, strict=True)]
    to_compress = [g for g, narrow in zip(grads, narrowed, strict=True) if narrow]
    others = [g for g, narrow in zip(grads, narrowed, strict=True) if not narrow]
    compressed = iter(_reduce_bf16(to_compress, op, name, group))
    plain = iter(tensors.grouped_allreduce(others, op, name, group))
    return [next(compressed) if narrow else next(plain) for narrow in narrowed]


def _reduce_bf16(grads: list[tf.Tensor], op: ReduceOp, name: str, group: cluster.Group | None) -> list[tf.Tensor]:
    if not grads:
        return []
    size = cluster.size() if group is None else group.size
    flat = tf.concat([tf.reshape(tf.cast(g, tf.bfloat16), [-1]) for g in grads], axis=0)
    padded = tf.pad(flat, [[0, -tf.size(flat) % size]])
    shard = reduce_scatter(padded, op, None, f"{name}_bf16", group=group)
    whole = tensors.allgather(shard, f"{name}_bf16_gather", group)[: tf.size(flat)]
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

    Across hosts, this uses Horovod's reducescatter. Within one host, each rank receives its share of all vectors
    (alltoall) and sums it in rank order. That moves the same (N-1)/N bytes but avoids the loops of
    ``MPI_Reduce_scatter``, which are several times slower than TensorFlow's in shared memory.

    Args:
        flat: ``[N * k]`` floats, with the same dtype and length on every rank.
        op: the reduction.
        wire: the dtype in which 32- and 64-bit floats are sent; None to send them uncompressed.
        name: name of the exchange.
        group: the N ranks; None for all ranks.
        native: whether to use Horovod's op instead of alltoall (bfloat16 always uses alltoall); None: as described
            above.

    Returns:
        ``[k]`` in the dtype of ``flat``: for rank r, the elements from ``r * k``.
    """
    sent = tf.cast(flat, dtype_on_wire(flat.dtype, wire))
    if native is None:
        native = len(set(cluster.cluster().hosts)) > 1
    if native and sent.dtype != tf.bfloat16:
        return tf.cast(tensors.reducescatter(sent, op, f"{name}_scatter", group), flat.dtype)
    size = cluster.size() if group is None else group.size
    length = tf.size(flat) // size
    received, _ = tensors.alltoall(sent, tf.fill([size], length), f"{name}_scatter", group)
    sum_dtype = flat.dtype if flat.dtype.size > 2 else tf.float32
    total = tf.reduce_sum(tf.cast(tf.reshape(received, [size, length]), sum_dtype), axis=0)
    return tf.cast(total / size if op == ReduceOp.Average else total, flat.dtype)
