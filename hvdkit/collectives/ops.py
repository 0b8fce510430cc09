"""Reduction ops."""

from __future__ import annotations

import enum
from collections.abc import Collection

from hvdkit.errors import describe


class ReduceOp(enum.IntEnum):
    """How values of several ranks are reduced to one. The numbers are those of Horovod."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

GRADIENT_OPS = (Average, Sum, Min, Max)


def checked_op(op: object, among: Collection[ReduceOp] = GRADIENT_OPS) -> ReduceOp:
    """Return ``op`` as a ReduceOp. Horovod's constants are accepted, too.

    Args:
        op: the reduction.
        among: reductions that the caller supports.

    Raises:
        ValueError: ``op`` is not in ``among``.
    """
    try:
        reduction = None if isinstance(op, bool) else ReduceOp(op)  # type: ignore[arg-type]
    except ValueError:
        reduction = None
    if reduction is None or reduction not in among:
        names = [f"hk.{each.name}" for each in among]
        got = op if reduction is None else reduction.name
        raise ValueError(describe("op", got, f"{', '.join(names[:-1])} or {names[-1]}", "pass one of these"))
    return reduction


def op_label(op: object) -> str:
    """Return the name of ``op`` for messages and comparisons. ``op`` may be invalid."""
    try:
        return ReduceOp(op).name  # type: ignore[arg-type]
    except ValueError:
        return repr(op)
