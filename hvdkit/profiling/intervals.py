"""Sets of time intervals: sorted, disjoint, non-adjacent lists of ``(start, end)``, in integer nanoseconds."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = list[Interval]


def union(spans: Iterable[Interval]) -> Intervals:
    """Return the union of ``spans``, which may overlap and be in any order.

    Example:
        >>> union([(5, 7), (0, 2), (1, 3), (7, 7)])
        [(0, 3), (5, 7)]
    """
    result: Intervals = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the intersection of ``a`` and ``b``.

    Example:
        >>> intersection([(0, 3), (5, 7)], [(2, 6)])
        [(2, 3), (5, 6)]
    """
    result = []
    i = 0
    j = 0
    while i < len(a) and j < len(b):
        start = max(a[i][0], b[j][0])
        end = min(a[i][1], b[j][1])
        if start < end:
            result.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def difference(a: Intervals, b: Intervals) -> Intervals:
    """Return the difference of ``a`` and ``b``.

    Example:
        >>> difference([(0, 3), (5, 7)], [(2, 6)])
        [(0, 2), (6, 7)]
    """
    if not a:
        return []
    edges = [a[0][0], *itertools.chain.from_iterable(b), a[-1][1]]
    gaps = zip(edges[::2], edges[1::2], strict=True)  # between the intervals of b
    return intersection(a, [(start, end) for start, end in gaps if start < end])


def clip(a: Intervals, start: int, end: int) -> Intervals:
    """Return the part of ``a`` between ``start`` and ``end``.

    Example:
        >>> clip([(0, 3), (5, 7), (8, 9)], 2, 6)
        [(2, 3), (5, 6)]
    """
    first = max(0, bisect_right(a, (start, start)) - 1)
    return intersection(a[first : bisect_left(a, (end, end))], [(start, end)])


def total(a: Intervals) -> int:
    """Return the total length of ``a``."""
    return sum(end - start for start, end in a)
