"""The reductions, by the field's names."""

from __future__ import annotations

import enum

from hvdkit.errors import describe


class ReduceOp(enum.IntEnum):
    """How values of several ranks become one. The numbers are Horovod's own."""

    Average = 0
    Sum = 1
    Min = 3
    Max = 4


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max


def checked_op(op: object) -> ReduceOp:
    """Return ``op`` as a ReduceOp; Horovod's own constants are taken, too.

    Raises:
        ValueError: ``op`` is none of Average, Sum, Min, Max.
    """
    try:
        return ReduceOp(op)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(describe("op", op, "hk.Average, hk.Sum, hk.Min or hk.Max", "pass one of these four")) from None


def op_label(op: object) -> str:
    """Return the name of ``op`` for messages and comparisons, whichever way it was given."""
    try:
        return ReduceOp(op).name  # type: ignore[arg-type]
    except ValueError:
        return repr(op)
