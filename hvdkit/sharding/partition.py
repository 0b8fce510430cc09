"""The rows of each rank under a rule: pure arithmetic, without communication or TensorFlow.

The rows of a rank are a Python ``range`` under every rule. The rows that an old and a new owner have in common are then
also a range, which NumPy can access as a slice on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from hvdkit.errors import describe

Partition = Literal["div", "mod"]

FLAT = "flat"
"""The rule for arrays whose elements are split in row-major order, so that a shard may start or end within a row."""


def rows_of(partition: str, rows: int, rank: int, size: int) -> range:
    """Return the global rows that ``rank`` of ``size`` holds, in storage order.

    ``div`` assigns contiguous rows, with one additional row on the first ``rows % size`` ranks; ``mod`` assigns rows
    round-robin. ``tf.nn.embedding_lookup`` has the same strategies.

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
    base_count, remainder = divmod(rows, size)
    start = rank * base_count + min(rank, remainder)
    return range(start, start + base_count + (rank < remainder))


def flat_shard_size(elements: int, size: int) -> int:
    """Return the number of elements per rank if an array is split into equal parts; the last parts may be smaller."""
    return -(-elements // size)


def flat_ranges(counts: Sequence[int], rank: int, size: int) -> list[range]:
    """Return the elements of each array that ``rank`` holds if the concatenated arrays are split into equal parts.

    Every rank has :func:`flat_shard_size` elements, or fewer at the end, so at most two arrays of a rank are partial.

    Args:
        counts: number of elements of each array.
        rank: 0 to ``size - 1``.
        size: number of ranks, >= 1.

    Example:
        >>> [flat_ranges([3, 4], r, 2) for r in range(2)]
        [[range(0, 3), range(0, 1)], [range(0, 0), range(1, 4)]]
    """
    shard_size = flat_shard_size(sum(counts), size)
    ranges = []
    offset = 0
    for count in counts:
        start, stop = (min(max(edge - offset, 0), count) for edge in (rank * shard_size, (rank + 1) * shard_size))
        ranges.append(range(start, stop) if start < stop else range(0))
        offset += count
    return ranges


def boxes_of(shape: Sequence[int], elements: range) -> list[tuple[range, ...]]:
    """Return the boxes (indices along each axis) that make up a range of an array's elements in row-major order.

    Example:
        >>> boxes_of((3, 4), range(2, 9))
        [(range(0, 1), range(2, 4)), (range(1, 2), range(0, 4)), (range(2, 3), range(0, 1))]
    """
    if not elements:
        return []
    if not shape:
        return [()]
    width = math.prod(shape[1:])
    top, left = divmod(elements.start, width)
    bottom, right = divmod(elements.stop, width)
    if top == bottom or (top + 1 == bottom and right == 0):  # within one row
        inner = range(left, left + len(elements))
        return [(range(top, top + 1), *box) for box in boxes_of(shape[1:], inner)]
    head = boxes_of(shape, range(elements.start, (top + 1) * width)) if left else []
    tail = boxes_of(shape, range(bottom * width, elements.stop)) if right else []
    whole = range(top + (left > 0), bottom)
    return [*head, *([(whole, *map(range, shape[1:]))] if whole else []), *tail]


def intersect(a: range, b: range) -> range:
    """Return the intersection of two ranges, ascending. Steps must be positive.

    The first common number follows from the Chinese remainder theorem: x = a0 (mod m), x = b0 (mod n).

    Example:
        >>> list(intersect(range(0, 20, 4), range(2, 20, 6)))
        [8]
    """
    divisor = math.gcd(a.step, b.step)
    if not a or not b or (b.start - a.start) % divisor:
        return range(0)
    step = a.step // divisor * b.step
    steps = (b.start - a.start) // divisor * pow(a.step // divisor, -1, b.step // divisor) % (b.step // divisor)
    common = a.start + steps * a.step
    low = max(a.start, b.start)
    return range(low + (common - low) % step, min(a[-1], b[-1]) + 1, step)


def positions(part: range, whole: range) -> slice:
    """Return the positions of the numbers of ``part`` in ``whole`` as a slice. ``whole`` must contain all of them.

    Example:
        >>> positions(range(4, 12, 4), range(0, 20, 2))
        slice(2, 5, 2)
    """
    if not part:
        return slice(0, 0, 1)
    first = whole.index(part[0])
    last = whole.index(part[-1])
    return slice(first, last + 1, max(1, (last - first) // max(1, len(part) - 1)))
