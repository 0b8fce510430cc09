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
    filled: list[list[int]] = []
    bytes_left = 0
    for index in reversed(range(len(nbytes))):
        remaining = sum(nbytes[: index + 1])
        if not filled or (bytes_left <= 0 and remaining > limit / 2):
            filled.append([])
            bytes_left = limit
        filled[-1].append(index)
        bytes_left -= nbytes[index]
    return filled
