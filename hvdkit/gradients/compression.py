"""What gradients look like on the wire: as they are, or in 16 bits.

``"fp16"`` halves the bytes and is summed in float16 by Horovod's own ring. Horovod does not sum bfloat16, so ``"bf16"``
is a ring of its own two halves: every rank gets its share of all vectors (alltoall), sums it in float32, rounds
once, and all shares are gathered. It moves the same 2 (N-1)/N bytes per byte of gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import tensors
from hvdkit.collectives.ops import ReduceOp
from hvdkit.errors import describe

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


def sum_dense(grads: Sequence[tf.Tensor], wire: tf.DType | None, name: str) -> list[tf.Tensor]:
    """Return the sum of each dense gradient over all ranks, in the gradient's own dtype.

    Only float32 and float64 are compressed; what is 16 bits wide already, or no float, travels as it is.
    """
    if wire is None:
        return tensors.grouped_allreduce(grads, ReduceOp.Sum, name)
    narrowed = [i for i, g in enumerate(grads) if g.dtype in (tf.float32, tf.float64)]
    results = dict.fromkeys(range(len(grads)), tf.constant(0))
    if wire == tf.float16:
        sent = [tf.cast(g, wire) if i in narrowed else g for i, g in enumerate(grads)]
        summed = tensors.grouped_allreduce(sent, ReduceOp.Sum, name)
        return [tf.cast(y, g.dtype) for y, g in zip(summed, grads, strict=True)]
    rest = [i for i in range(len(grads)) if i not in narrowed]
    results.update(zip(narrowed, _sum_bf16([grads[i] for i in narrowed], name), strict=True))
    if rest:
        results.update(zip(rest, tensors.grouped_allreduce([grads[i] for i in rest], ReduceOp.Sum, name), strict=True))
    return [results[i] for i in range(len(grads))]


def _sum_bf16(grads: list[tf.Tensor], name: str) -> list[tf.Tensor]:
    if not grads:
        return []
    size = cluster.size()
    flat = tf.concat([tf.reshape(tf.cast(g, tf.bfloat16), [-1]) for g in grads], axis=0)
    length = tf.size(flat)
    share = (length + size - 1) // size
    padded = tf.pad(flat, [[0, share * size - length]])
    received, _ = tensors.alltoall(padded, tf.fill([size], share), f"{name}_bf16_scatter")
    total = tf.reduce_sum(tf.cast(tf.reshape(received, [size, share]), tf.float32), axis=0)
    whole = tensors.allgather(tf.cast(total, tf.bfloat16), f"{name}_bf16_gather")[:length]
    parts = tf.split(whole, [tf.size(g) for g in grads], num=len(grads))
    return [tf.cast(tf.reshape(p, tf.shape(g)), g.dtype) for p, g in zip(parts, grads, strict=True)]
