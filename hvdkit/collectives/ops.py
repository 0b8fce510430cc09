"""Reduction ops."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import cast

from hvdkit.errors import describe


class ReduceOp(enum.IntEnum):
    """How values of several ranks are reduced to one. The numbers are those of Horovod.

    Examples:
        >>> import hvdkit as hk
        >>> hk.Average
        <ReduceOp.Average: 0>
    """

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
"""The mean over ranks; for integers, rounded toward zero."""
Sum = ReduceOp.Sum
"""The sum over ranks."""
Adasum = ReduceOp.Adasum
"""The adaptive sum over ranks (Maleki et al. 2020, arXiv:2006.02924); floats, MPI and 2**k ranks only."""
Min = ReduceOp.Min
"""The elementwise minimum over ranks."""
Max = ReduceOp.Max
"""The elementwise maximum over ranks."""
Product = ReduceOp.Product
"""The elementwise product over ranks."""

GRADIENT_OPS = (Average, Sum, Min, Max)


def checked_op(op: object, among: Collection[ReduceOp] = GRADIENT_OPS) -> ReduceOp:
    """Return ``op`` as a ReduceOp. Horovod's constants are accepted, too.

    Raises:
        ValueError: ``op`` is not in ``among``.
    """
    try:
        reduction = None if isinstance(op, bool) else ReduceOp(cast(int, op))
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
        return ReduceOp(cast(int, op)).name
    except ValueError:
        return repr(op)
