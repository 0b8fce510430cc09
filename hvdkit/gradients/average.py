"""Averaging gradients over ranks: dense, IndexedSlices and None, in their order. All three are handled here only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.agreement import Call, agree, attempt
from hvdkit.collectives.ops import Average, ReduceOp, checked_op
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
) -> list[Gradient]:
    """Combine every gradient over all ranks; all ranks get the same result, to the bit.

    The formula, with g_r the gradient and w_r the weight of rank r:

        Average   sum_r g_r / N,  or with weights  sum_r w_r g_r / sum_r w_r
        Sum       sum_r g_r,      or with weights  sum_r w_r g_r

    Where each rank's loss is the mean over its local batch, passing the number of its local examples as ``weight``
    gives the gradient of the mean over the global batch, however unevenly that is spread. A rank without examples
    passes 0, and then its gradients may be NaN.

    Args:
        grads: one gradient per variable, in the same order on every rank: a dense tensor (equal shape and dtype on
            every rank), IndexedSlices (rows differ between ranks, repeated rows are summed), or None.
        op: ``hk.Average`` or ``hk.Sum``; ``hk.Min`` and ``hk.Max`` for dense gradients without weight.
        weight: this rank's weight, a number or scalar tensor >= 0; given on every rank or on none.
        compression: ``"fp16"`` or ``"bf16"`` to send 32- and 64-bit floats in 16 bits.

    Returns:
        The results in the order of ``grads``: the same kinds and dtypes; IndexedSlices have distinct rows; None
        stays None.

    Raises:
        TypeError: an element of ``grads`` is no gradient.
        ValueError: ``op``, ``weight`` or ``compression`` is none of the above.
        CollectiveMismatchError: in eager mode, ranks passed unlike gradients; it names rank and tensor.

    Example::

        grads = tape.gradient(loss, model.trainable_variables)
        grads = hk.average_gradients(grads, weight=len(images))
    """
    listed = list(grads)
    problem = attempt(lambda: _check(listed, op, weight, compression))
    if tf.executing_eagerly() and not any(is_symbolic(part) for part in _parts(listed)):
        agree(_call(listed, op, weight, compression, problem))
    elif problem is not None:
        raise problem
    op, wire = checked_op(op), wires.wire_dtype(compression)
    if op in (ReduceOp.Min, ReduceOp.Max):
        return _place(listed, grouped_allreduce(_dense(listed), op, "hvdkit.gradients"), [])
    factor, divisor = _scales(op, weight)
    rows = [sparse.sum_duplicates(g) for g in listed if isinstance(g, tf.IndexedSlices)]
    dense, kept = _scaled(_dense(listed), factor), [_scaled_rows(g, factor) for g in rows]
    summed, summed_rows, total = _sum(dense, kept, divisor, wire)
    if total is not None:
        summed = [tf.math.divide_no_nan(y, tf.cast(total, y.dtype)) for y in summed]
        summed_rows = [_with_values(g, tf.math.divide_no_nan(g.values, tf.cast(total, g.dtype))) for g in summed_rows]
    return _place(listed, summed, summed_rows)


def _scales(op: ReduceOp, weight: Any) -> tuple[Any, tf.Tensor | None]:
    """Return what to multiply gradients by before the sum, and the weight to sum along and divide by after."""
    if weight is None:
        return (1.0 / cluster.size() if op == ReduceOp.Average else None), None
    w = tf.cast(as_tensor(weight), tf.float64)
    return w, (w if op == ReduceOp.Average else None)


def _scaled(grads: list[tf.Tensor], factor: Any) -> list[tf.Tensor]:
    if factor is None or (isinstance(factor, float) and factor == 1.0):
        return grads
    if isinstance(factor, float):
        return [g * tf.cast(factor, g.dtype) for g in grads]
    # A rank without examples has weight 0 and a gradient that is 0/0: it must not spoil the others'.
    return [tf.where(factor > 0, g * tf.cast(factor, g.dtype), tf.zeros_like(g)) for g in grads]


def _scaled_rows(grad: tf.IndexedSlices, factor: Any) -> tf.IndexedSlices:
    return _with_values(grad, _scaled([grad.values], factor)[0])


def _with_values(grad: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, grad.indices, grad.dense_shape)


def _sum(
    dense: list[tf.Tensor], rows: list[tf.IndexedSlices], weight: tf.Tensor | None, wire: tf.DType | None
) -> tuple[list[tf.Tensor], list[tf.IndexedSlices], tf.Tensor | None]:
    """Sum dense gradients, rows and the weight over all ranks."""
    if cluster.size() == 1:
        return dense, rows, weight
    tiny = [i for i, g in enumerate(rows) if sparse.is_tiny(g)]
    large = [i for i in range(len(rows)) if i not in tiny]
    # Tiny tables ride with the dense gradients; the weight rides along in float32, exact up to 2**24 examples.
    riders = [tf.convert_to_tensor(rows[i]) for i in tiny]
    extra = [] if weight is None else [tf.reshape(tf.cast(weight, tf.float32), [1])]
    sent = dense + riders
    if wire is None:
        together = wires.sum_dense(sent + extra, None, "hvdkit.gradients") if sent or extra else []
    else:
        together = wires.sum_dense(sent, wire, "hvdkit.gradients") if sent else []
        together += wires.sum_dense(extra, None, "hvdkit.weight") if extra else []
    sums: dict[int, tf.IndexedSlices] = {}
    for i, y in zip(tiny, together[len(dense) : len(sent)], strict=True):
        sums[i] = tf.IndexedSlices(y, tf.range(tf.shape(y)[0], dtype=rows[i].indices.dtype), rows[i].dense_shape)
    gathered = sparse.sum_over_ranks(
        [rows[i] for i in large], wire, lambda y, name: wires.sum_dense([y], wire, name)[0]
    )
    sums.update(zip(large, gathered, strict=True))
    total = None if weight is None else together[-1][0]
    return together[: len(dense)], [sums[i] for i in range(len(rows))], total


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
    sparse_too = any(isinstance(g, tf.IndexedSlices) for g in grads)
    if checked_op(op) in (ReduceOp.Min, ReduceOp.Max) and (sparse_too or weight is not None or compression):
        raise ValueError(
            describe(
                "op", checked_op(op).name, "Average or Sum with sparse gradients, weight or compression", "use hk.Sum"
            )
        )
    known = None if weight is None else tf.get_static_value(as_tensor(weight))
    if known is not None and (known.ndim != 0 or not known >= 0):
        raise ValueError(describe("weight", weight, "one number >= 0", "pass the number of this rank's examples"))


def _call(grads: list[Gradient], op: Any, weight: Any, compression: Any, problem: Exception | None) -> Call:
    """Describe this rank's call for the comparison of ranks."""
    kinds = [("none", ()) if g is None else _kind(g) for g in grads] if problem is None else []
    weighted = "" if weight is None else ", weight"
    label = f"average_gradients(op={op!r}, compression={compression}{weighted})"
    return Call(label, tuple(k[0] for k in kinds), tuple(k[1] for k in kinds), problem=problem)


def _kind(grad: tf.Tensor | tf.IndexedSlices) -> tuple[str, tuple[int, ...]]:
    if isinstance(grad, tf.IndexedSlices):
        return f"sparse {grad.dtype.name} rows of ", tuple(grad.values.shape[1:])
    return grad.dtype.name, tuple(grad.shape)
