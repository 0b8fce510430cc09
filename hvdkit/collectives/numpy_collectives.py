"""The collectives in NumPy, on the values of all ranks: the last step of an exchange of small values.

They follow the rules of :mod:`hvdkit.collectives.tensors`, so that results do not depend on the message size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdkit.collectives.dtypes import average_factor, wire_dtype
from hvdkit.collectives.ops import ReduceOp


def reduce(
    parts: Sequence[np.ndarray],
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    size: int | None = None,
) -> np.ndarray:
    """Reduce arrays of equal shape, one per rank, in rank order, so that every rank gets the same bits.

    ``size`` is the number of ranks for an average, if some have joined; default: ``len(parts)``.
    """
    dtype = parts[0].dtype
    size = len(parts) if size is None else size
    wire = wire_dtype(dtype, op).as_numpy_dtype
    factor = average_factor(wire, op, size)
    with np.errstate(over="ignore", invalid="ignore"):
        sent = [_scaled(_scaled(part.astype(wire, copy=False), prescale), factor) for part in parts]
        if op in (ReduceOp.Min, ReduceOp.Max):
            result = _min_or_max(sent, op)
        elif op == ReduceOp.Product:
            result = np.multiply.reduce(np.stack(sent), axis=0, dtype=wire)
        else:
            result = np.add.reduce(np.stack(sent), axis=0, dtype=wire)
        if op == ReduceOp.Average and factor == 1.0:
            result = _divided(result, size)
        return np.asarray(_scaled(result, postscale)).astype(dtype, copy=False)


def _min_or_max(parts: Sequence[np.ndarray], op: ReduceOp) -> np.ndarray:
    """Return the elementwise minimum or maximum. NaN propagates, and -0 is less than 0."""
    stack = np.stack(parts)
    result: np.ndarray = stack.min(axis=0) if op == ReduceOp.Min else stack.max(axis=0)
    if stack.dtype.kind != "f":
        return result
    negative = np.signbit(stack).any(axis=0) if op == ReduceOp.Min else np.signbit(stack).all(axis=0)
    return np.where(result == 0, np.where(negative, -0.0, 0.0).astype(result.dtype), result)


def _divided(total: np.ndarray, size: int) -> np.ndarray:
    """Return ``total / size``, rounded toward zero for integers."""
    if total.dtype.kind == "f":
        exact: np.ndarray = total / total.dtype.type(size)
        return exact
    quotient = total // size
    # Floor division rounds down: add 1 to negative inexact quotients.
    rounded: np.ndarray = quotient + ((total < 0) & (quotient * size != total)).astype(total.dtype)
    return rounded


def _scaled(x: np.ndarray, factor: float) -> np.ndarray:
    if factor == 1.0:
        return x
    if x.dtype.kind != "f":
        return np.trunc(x.astype(np.float64) * factor).astype(x.dtype)
    wide = np.float32 if x.dtype == np.float16 else x.dtype.type
    return (x.astype(wide) * wide(factor)).astype(x.dtype)


def exchange_rows(
    parts: Sequence[np.ndarray], splits: Sequence[np.ndarray], rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that all ranks send to ``rank``, and the number of rows from each rank."""
    rows = [part[counts[:rank].sum() :][: counts[rank]] for part, counts in zip(parts, splits, strict=True)]
    received = np.array([len(r) for r in rows], np.int32)
    return np.concatenate(rows), received
