"""What gradients look like on the wire: as they are, or in 16 bits.

``"fp16"`` halves the bytes and is summed in float16 by Horovod's own ring. Horovod does not sum bfloat16, so ``"bf16"``
is a ring of its own two halves: every rank gets its share of all vectors (alltoall), sums it in float32, rounds
once, and all shares are gathered. It moves the same 2 (N-1)/N bytes per byte of gradient.
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


def reduce_dense(grads: Sequence[tf.Tensor], op: ReduceOp, wire: tf.DType | None, name: str) -> list[tf.Tensor]:
    """Return each dense gradient combined over all ranks by ``op``, Average or Sum, in the gradient's own dtype.

    Gradients go out in buckets, those of the last variables first: the backward pass computes them first, and goes on
    while they travel.
    """
    results: dict[int, tf.Tensor] = {}
    nbytes = [(g.shape.num_elements() or 0) * dtype_on_wire(g.dtype, wire).size for g in grads]
    for number, places in enumerate(buckets(nbytes, bucket_bytes())):
        each = name if number == 0 else f"{name}_{number}"
        results |= zip(places, _reduce_bucket([grads[i] for i in places], op, wire, each), strict=True)
    return [results[i] for i in range(len(grads))]


def _reduce_bucket(grads: Sequence[tf.Tensor], op: ReduceOp, wire: tf.DType | None, name: str) -> list[tf.Tensor]:
    narrowed = [dtype_on_wire(g.dtype, wire) != g.dtype for g in grads]
    if wire != tf.bfloat16:
        sent = [tf.cast(g, dtype_on_wire(g.dtype, wire)) for g in grads]
        reduced = tensors.grouped_allreduce(sent, op, name)
        return [tf.cast(y, g.dtype) for y, g in zip(reduced, grads, strict=True)]
    ours = [g for g, narrow in zip(grads, narrowed, strict=True) if narrow]
    rest = [g for g, narrow in zip(grads, narrowed, strict=True) if not narrow]
    compressed, plain = iter(_reduce_bf16(ours, op, name)), iter(tensors.grouped_allreduce(rest, op, name))
    return [next(compressed) if narrow else next(plain) for narrow in narrowed]


def _reduce_bf16(grads: list[tf.Tensor], op: ReduceOp, name: str) -> list[tf.Tensor]:
    if not grads:
        return []
    size = cluster.size()
    flat = tf.concat([tf.reshape(tf.cast(g, tf.bfloat16), [-1]) for g in grads], axis=0)
    length = tf.size(flat)
    share = (length + size - 1) // size
    padded = tf.pad(flat, [[0, share * size - length]])
    received, _ = tensors.alltoall(padded, tf.fill([size], share), f"{name}_bf16_scatter")
    combine = tf.reduce_mean if op == ReduceOp.Average else tf.reduce_sum
    mine = combine(tf.cast(tf.reshape(received, [size, share]), tf.float32), axis=0)
    whole = tensors.allgather(tf.cast(mine, tf.bfloat16), f"{name}_bf16_gather")[:length]
    parts = tf.split(whole, [tf.size(g) for g in grads], num=len(grads))
    return [tf.cast(tf.reshape(p, tf.shape(g)), g.dtype) for p, g in zip(parts, grads, strict=True)]
