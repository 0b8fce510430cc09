"""Averaging gradients over ranks: dense, IndexedSlices and None, in their order. All three are handled here only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.agreement import Call, agree, attempt
from hvdkit.collectives.ops import Average, ReduceOp, checked_op
from hvdkit.collectives.shards import Shard, shard_of
from hvdkit.collectives.tensors import grouped_allreduce
from hvdkit.collectives.values import as_tensor, graph_safe, is_symbolic
from hvdkit.errors import describe
from hvdkit.gradients import compression as wires
from hvdkit.gradients import sparse

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


@graph_safe
def average_gradients(
    grads: Sequence[Gradient],
    *,
    op: ReduceOp = Average,
    weight: Any = None,
    compression: str | None = None,
    variables: Sequence[Any] | None = None,
) -> list[Gradient]:
    """Combine every gradient over all ranks; all ranks get the same result, to the bit.

    The formula, with g_r the gradient and w_r the weight of rank r:

        Average   sum_r g_r / N,  or with weights  sum_r w_r g_r / sum_r w_r
        Sum       sum_r g_r,      or with weights  sum_r w_r g_r

    Where each rank's loss is the mean over its local batch, passing the number of its local examples as ``weight``
    gives the gradient of the mean over the global batch, however unevenly that is spread. A rank without examples
    passes 0, and then its gradients may be NaN. Ranks that work on one batch together, along other axes of the mesh
    than "data", count once.

    Args:
        grads: one gradient per variable, in the same order on every rank: a dense tensor (equal shape and dtype on
            every rank), IndexedSlices (rows differ between ranks, repeated rows are summed), or None.
        op: ``hk.Average`` or ``hk.Sum``; ``hk.Min`` and ``hk.Max`` for dense gradients without weight.
        weight: this rank's weight, a number or scalar tensor >= 0; given on every rank or on none. Inside a graph a
            weight that is negative or NaN makes the result NaN on all ranks.
        compression: ``"fp16"`` or ``"bf16"`` to send 32- and 64-bit floats in 16 bits.
        variables: what the gradients belong to. Those of sharded variables have been summed over the ranks on their
            way to the owner, and are only divided by N where ``op`` is Average. Needed where there are such; ``weight``
            then belongs to ``hk.DistributedGradientTape``, which weighs before gradients travel.

    Returns:
        The results in the order of ``grads``, of the same kinds and dtypes; IndexedSlices have distinct rows.

    Raises:
        TypeError: an element of ``grads`` is no gradient.
        ValueError: ``op``, ``weight`` or ``compression`` is none of the above.
        CollectiveMismatchError: in eager mode, ranks passed unlike gradients; it names rank and tensor.

    Example::

        grads = tape.gradient(loss, model.trainable_variables)
        grads = hk.average_gradients(grads, weight=len(images))
    """
    listed = list(grads)
    shards = [shard_of(v) for v in variables] if variables is not None else [None] * len(listed)
    if any(shard is not None for shard in shards):
        return _beside_shards(listed, shards, {"op": op, "weight": weight, "compression": compression})
    agree_on(listed, op, weight, compression)
    op, wire = checked_op(op), wires.wire_dtype(compression)
    if op in (ReduceOp.Min, ReduceOp.Max):
        return _place(listed, grouped_allreduce(_dense(listed), op, "hvdkit.gradients"), [])
    if weight is not None:
        listed, op = _weighted(listed, share(weight, op)), ReduceOp.Sum
    rows = [sparse.sum_duplicates(g) for g in listed if isinstance(g, tf.IndexedSlices)]
    if cluster.size() == 1:
        return _place(listed, _dense(listed), rows)
    combined = _place(listed, *_combine(_dense(listed), rows, op, wire))
    alike = copies() if op == ReduceOp.Sum else 1
    return combined if alike == 1 else [mapped(g, lambda x: x / alike) for g in combined]


def _beside_shards(grads: list[Gradient], shards: Sequence[Shard | None], how: dict[str, Any]) -> list[Gradient]:
    if how["weight"] is not None:
        remedy = "give it to hk.DistributedGradientTape"
        raise ValueError(describe("weight", how["weight"], "none beside gradients of sharded variables", remedy))
    summed = [sparse.sum_duplicates(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
    return combine_kinds(summed, shards, how["op"], lambda replicated: average_gradients(replicated, **how))


def combine_kinds(
    grads: Sequence[Gradient],
    shards: Sequence[Shard | None],
    op: ReduceOp,
    combine: Callable[[list[Gradient]], list[Gradient]],
) -> list[Gradient]:
    """Combine gradients of replicated variables and of shards.

    With N ranks, C of which work on each batch together: a table's rows are sums over all N ranks already, of which
    an average is 1/N and a sum 1/C. A layer's part along an axis of the mesh has the whole gradient of its batch, and
    is combined over the ranks with other batches.
    """
    divisor = cluster.size() if checked_op(op) == Average else copies()
    replicated = iter(combine([g for g, shard in zip(grads, shards, strict=True) if shard is None]))
    parts = [g for g, s in zip(grads, shards, strict=True) if s is not None and s.axis is not None and g is not None]
    along = cluster.group(cluster.DATA)
    reduced = iter(grouped_allreduce(parts, checked_op(op), "hvdkit.gradients.parts", along) if parts else [])
    results: list[Gradient] = []
    for grad, shard in zip(grads, shards, strict=True):
        if shard is None:
            results.append(next(replicated))
        elif shard.axis is None or grad is None:
            results.append(_divided(grad, divisor))
        else:
            results.append(next(reduced))
    return results


def _divided(grad: Gradient, divisor: int) -> Gradient:
    if divisor == 1 or grad is None:
        return grad
    return sparse.Share(grad, divisor) if isinstance(grad, tf.IndexedSlices) else grad / divisor


def copies() -> int:
    """Return how many ranks work on each batch together."""
    return cluster.size() // cluster.group(cluster.DATA).size


def mapped(grad: Gradient, fn: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    """Return a gradient whose values have gone through ``fn``."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(fn(grad.values), grad.indices, grad.dense_shape)
    return None if grad is None else fn(grad)


def agree_on(grads: list[Gradient], op: Any, weight: Any, compression: Any) -> None:
    """Check the arguments of :func:`average_gradients`, in eager mode on all ranks together; raise as it does."""
    problem = attempt(lambda: _check(grads, op, weight, compression))
    if tf.executing_eagerly() and not any(is_symbolic(part) for part in _parts(grads)):
        agree(_call(grads, op, weight, compression, problem))
    elif problem is not None:
        raise problem


def share(weight: Any, op: ReduceOp) -> tf.Tensor:
    """Return the factor of this rank's gradients in a plain sum: w_r, or w_r / sum_r w_r for the average.

    The weights are known before the gradients are, so that inside a graph their exchange runs beside the step.
    """
    w = tf.cast(as_tensor(weight), tf.float64)
    # Inside a graph a bad weight is known too late to raise on every rank: it makes every rank's result NaN instead.
    w = tf.where(w >= 0, w, np.nan)
    if op == ReduceOp.Sum:
        return w
    along = cluster.group(cluster.DATA)
    return tf.math.divide_no_nan(w, grouped_allreduce([w], ReduceOp.Sum, "hvdkit.weight", along)[0])


def _weighted(grads: list[Gradient], factor: tf.Tensor) -> list[Gradient]:
    return [mapped(zero_without_weight(g, factor), lambda x: x * tf.cast(factor, x.dtype)) for g in grads]


def zero_without_weight(grad: Gradient, factor: tf.Tensor) -> Gradient:
    """Return zeros for a rank of weight 0: without examples its gradient is 0/0, and must not spoil the others'."""
    return mapped(grad, lambda x: tf.where(tf.equal(factor, 0), tf.zeros_like(x), x))


def _combine(
    dense: list[tf.Tensor], rows: list[tf.IndexedSlices], op: ReduceOp, wire: tf.DType | None
) -> tuple[list[tf.Tensor], list[tf.IndexedSlices]]:
    """Combine dense gradients and rows by ``op``, Average or Sum; tiny tables ride with the dense ones."""
    tiny = [i for i, g in enumerate(rows) if sparse.is_tiny(g)]
    large = [i for i in range(len(rows)) if i not in tiny]
    riders = [tf.convert_to_tensor(rows[i]) for i in tiny]
    together = wires.reduce_dense(dense + riders, op, wire, "hvdkit.gradients")
    combined = dict(zip(large, sparse.combine([rows[i] for i in large], op, wire), strict=True))
    for i, y in zip(tiny, together[len(dense) :], strict=True):
        every_row = tf.range(tf.shape(y)[0], dtype=rows[i].indices.dtype)
        combined[i] = tf.IndexedSlices(y, every_row, rows[i].dense_shape)
    return together[: len(dense)], [combined[i] for i in range(len(rows))]


def _dense(grads: list[Gradient]) -> list[tf.Tensor]:
    return [g for g in grads if g is not None and not isinstance(g, tf.IndexedSlices)]


def _place(grads: list[Gradient], dense: list[tf.Tensor], rows: list[tf.IndexedSlices]) -> list[Gradient]:
    """Put the results back in the places of ``grads``."""
    next_dense, next_rows = iter(dense), iter(rows)
    kinds = [None if g is None else (next_rows if isinstance(g, tf.IndexedSlices) else next_dense) for g in grads]
    return [None if source is None else next(source) for source in kinds]


def _parts(grads: list[Gradient]) -> list[tf.Tensor]:
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]


def _check(grads: list[Gradient], op: Any, weight: Any, compression: Any) -> None:
    wires.wire_dtype(compression)
    for i, g in enumerate(grads):
        if g is not None and not isinstance(g, (tf.Tensor, tf.IndexedSlices)):
            raise TypeError(
                describe(
                    f"grads[{i}]", type(g).__name__, "a tensor, IndexedSlices or None", "pass tape.gradient's result"
                )
            )
        if g is not None and not g.dtype.is_floating:
            raise TypeError(
                describe(f"grads[{i}]", g.dtype.name, "a floating-point dtype", "combine numbers with hk.allreduce")
            )
    sparse_too = any(isinstance(g, tf.IndexedSlices) for g in grads)
    if checked_op(op) in (ReduceOp.Min, ReduceOp.Max) and (sparse_too or weight is not None or compression):
        raise ValueError(
            describe(
                "op", checked_op(op).name, "Average or Sum with sparse gradients, weight or compression", "use hk.Sum"
            )
        )
    known = None if weight is None else tf.get_static_value(as_tensor(weight))
    if known is not None and (known.ndim != 0 or not 0 <= known < np.inf):
        raise ValueError(
            describe("weight", weight, "one finite number >= 0", "pass the number of this rank's examples")
        )


def _call(grads: list[Gradient], op: Any, weight: Any, compression: Any, problem: Exception | None) -> Call:
    """Describe this rank's call for the comparison of ranks."""
    kinds = [("none", ()) if g is None else _kind(g) for g in grads] if problem is None else []
    weighted = "" if weight is None else ", weight"
    label = f"average_gradients(op={op!r}, compression={compression}{weighted})"
    return Call(label, tuple(k[0] for k in kinds), tuple(k[1] for k in kinds), problem=problem)


def _kind(grad: tf.Tensor | tf.IndexedSlices) -> tuple[str, tuple[int, ...]]:
    if isinstance(grad, tf.IndexedSlices):
        # All of it decides how the gradient is sent, and must be equal on all ranks.
        whole = sparse.dense_shape(grad)
        table = "a table of unknown shape" if whole is None else f"a table {list(whole)}"
        return f"sparse {grad.dtype.name} by {grad.indices.dtype.name} into {table}, rows ", tuple(
            grad.values.shape[1:]
        )
    return grad.dtype.name, tuple(grad.shape)
