"""The collectives on values that are all here already, in NumPy: what an exchange of small values ends with."""

from __future__ import annotations

import numpy as np

from hvdkit.collectives.ops import ReduceOp


def reduce(parts: list[np.ndarray], op: ReduceOp) -> np.ndarray:
    """Reduce equal-shaped arrays, one of each rank, in rank order: every rank gets the same bits.

    16-bit floats are summed in float32. Integers keep their dtype; their average is rounded toward zero.
    """
    dtype = parts[0].dtype
    stack = np.stack(parts)
    if op == ReduceOp.Min:
        return stack.min(axis=0)
    if op == ReduceOp.Max:
        return stack.max(axis=0)
    if dtype.kind in "iu":
        total = stack.sum(axis=0, dtype=np.int64 if dtype.kind == "i" else np.uint64)
        if op == ReduceOp.Average:
            quotient = total // len(parts)
            # Floor division rounds down: negative results that are not whole go up by one.
            total = quotient + ((total < 0) & (quotient * len(parts) != total)).astype(total.dtype)
        return total.astype(dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    total = stack.sum(axis=0, dtype=wide)
    return (total / wide(len(parts)) if op == ReduceOp.Average else total).astype(dtype)


def exchange_rows(parts: list[np.ndarray], splits: list[np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that every rank sends to ``rank``, and how many came from each."""
    rows = []
    for part, counts in zip(parts, splits, strict=True):
        start = int(counts[:rank].sum())
        rows.append(part[start : start + int(counts[rank])])
    received = np.array([len(r) for r in rows], np.int32)
    return np.concatenate(rows), received


def scatter_bounds(rows: int, size: int, rank: int) -> tuple[int, int]:
    """Return the rows of a reduce-scatter that ``rank`` gets: the first ``rows % size`` ranks get one more."""
    each, more = divmod(rows, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)
