"""Gradient bucketing."""

from __future__ import annotations

from collections.abc import Sequence


def buckets(nbytes: Sequence[int], limit: int) -> list[list[int]]:
    """Group gradients into buckets, from the last one on; return their indices. A bucket is full at ``limit`` bytes.

    A small remainder is added to the previous bucket.

    Example:
        >>> buckets([10, 60, 50, 70, 40], 100)
        [[4, 3], [2, 1, 0]]
    """
    made: list[list[int]] = []
    room = 0
    for place in reversed(range(len(nbytes))):
        rest = sum(nbytes[: place + 1])
        if not made or (room <= 0 and rest > limit / 2):
            made.append([])
            room = limit
        made[-1].append(place)
        room -= nbytes[place]
    return made
