"""Who owns which rows: pure arithmetic, without communication or TensorFlow.

A rank's rows are a Python ``range``, whatever the rule, so that the rows that an old and a new owner share are a range
as well, and numpy reaches them by a slice on either side.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from hvdkit.errors import describe

Partition = Literal["div", "mod"]


def rows_of(partition: str, rows: int, rank: int, size: int) -> range:
    """Return the global rows that ``rank`` of ``size`` holds, in the order in which it holds them.

    ``div`` gives contiguous runs, the first ``rows % size`` ranks one row more than the others; ``mod`` deals
    rows out in turn. Both are the strategies of ``tf.nn.embedding_lookup``.

    Args:
        partition: ``"div"`` or ``"mod"``.
        rows: global number of rows, >= 0; may be smaller than ``size``.
        rank: 0 to ``size - 1``.
        size: number of ranks, >= 1.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> [rows_of("div", 5, r, 2) for r in range(2)], [rows_of("mod", 5, r, 2) for r in range(2)]
        ([range(0, 3), range(3, 5)], [range(0, 5, 2), range(1, 5, 2)])
    """
    if partition not in get_args(Partition):
        raise ValueError(describe("partition", partition, "'div' or 'mod'", "pass one of them"))
    if rows < 0 or not 0 <= rank < size:
        raise ValueError(
            describe("rows, rank, size", (rows, rank, size), "rows >= 0 and 0 <= rank < size", "check them")
        )
    if partition == "mod":
        return range(rank, rows, size)
    each, longer = divmod(rows, size)
    start = rank * each + min(rank, longer)
    return range(start, start + each + (rank < longer))


def intersect(a: range, b: range) -> range:
    """Return the numbers that are in both ranges, ascending. Steps must be positive.

    The first common number follows from the Chinese remainder theorem: x = a0 (mod m), x = b0 (mod n).

    Example:
        >>> list(intersect(range(0, 20, 4), range(2, 20, 6)))
        [8]
    """
    divisor = math.gcd(a.step, b.step)
    if not a or not b or (b.start - a.start) % divisor:
        return range(0)
    step = a.step // divisor * b.step
    turns = (b.start - a.start) // divisor * pow(a.step // divisor, -1, b.step // divisor) % (b.step // divisor)
    common = a.start + turns * a.step
    low = max(a.start, b.start)
    return range(low + (common - low) % step, min(a[-1], b[-1]) + 1, step)


def positions(part: range, whole: range) -> slice:
    """Return where the numbers of ``part`` stand in ``whole``, as a slice. Every one of them must be in it.

    Example:
        >>> positions(range(4, 12, 4), range(0, 20, 2))
        slice(2, 5, 2)
    """
    if not part:
        return slice(0, 0, 1)
    first, last = whole.index(part[0]), whole.index(part[-1])
    return slice(first, last + 1, max(1, (last - first) // max(1, len(part) - 1)))
