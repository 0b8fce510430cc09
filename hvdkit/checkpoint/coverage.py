"""Whether the parts of a sharded tensor cover it exactly once. Pure arithmetic on the indices of the parts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hvdkit.sharding.partition import intersect

if TYPE_CHECKING:
    from hvdkit.checkpoint.manifest import TensorEntry


def coverage_problem(tensor: TensorEntry) -> str | None:
    """Return None if the parts of a sharded tensor cover it exactly once, else a description of the problem.

    Parts cover the tensor if they are disjoint, within bounds, and have as many elements as the tensor.
    """
    boxes = [part.ranges() for part in tensor.parts]
    lengths = tensor.index_lengths
    for part, box in zip(tensor.parts, boxes, strict=True):
        is_inside = all(not axis or (axis[0] >= 0 and axis[-1] < n) for axis, n in zip(box, lengths, strict=False))
        if len(box) != len(lengths) or not is_inside:
            return f"has a part in {part.file} that lies outside: {part.index}"
    if (pair := _find_overlap(boxes)) is not None:
        return f"has elements in {tensor.parts[pair[0]].file} and again in {tensor.parts[pair[1]].file}"
    covered = sum(math.prod(map(len, box)) for box in boxes)
    total = math.prod(tensor.shape)
    return None if covered == total else f"is not covered: {total - covered} of {total} elements are in no file"


def _find_overlap(boxes: list[tuple[range, ...]]) -> tuple[int, int] | None:
    """Return the (lower, higher) indices of two of ``boxes`` that have an element in common, or None.

    Tables are partitioned along one axis into contiguous ranges, or round-robin with a common step. So boxes are sorted
    by remainder and start along the first axis on which they differ, and each is compared with the earlier boxes that
    extend to its start.
    """
    if not boxes or not boxes[0]:
        return (0, 1) if len(boxes) > 1 else None  # scalars
    axis = next((i for i, first in enumerate(boxes[0]) if any(box[i] != first for box in boxes)), 0)
    steps = {box[axis].step for box in boxes if len(box[axis]) > 1}
    step = steps.pop() if len(steps) == 1 else 1

    def remainder_and_start(box: int) -> tuple[int, int]:
        start = boxes[box][axis].start
        return start % step, start

    candidates: list[int] = []  # earlier boxes with the same remainder that extend to the start of this one
    for current in sorted((i for i, box in enumerate(boxes) if all(box)), key=remainder_and_start):
        remainder, start = remainder_and_start(current)
        candidates = [i for i in candidates if boxes[i][axis].start % step == remainder and boxes[i][axis][-1] >= start]
        for other in candidates:
            if all(intersect(a, b) for a, b in zip(boxes[other], boxes[current], strict=True)):
                return min(other, current), max(other, current)
        candidates.append(current)
    return None
