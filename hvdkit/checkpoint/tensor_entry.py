"""The manifest's entry of a tensor: its parts, and whether these cover it exactly once. Arithmetic on their indices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.checkpoint.bounds import DIMENSIONS, TOTAL_BYTES
from hvdkit.checkpoint.schema import FieldError, array, choice, integer, optional, text, typed
from hvdkit.checkpoint.tensorfile import DTYPES
from hvdkit.errors import printable
from hvdkit.sharding.partition import FLAT, intersect


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor, or an entire replicated tensor.

    Attributes:
        file: the file's name in the checkpoint's folder.
        checksum: checksum of the bytes, computed by blocks (see ``tensorfile``).
        index: for a sharded tensor, ``[start, stop, step]`` of the global indices along each axis; if the rule is
            "flat", of the elements in row-major order.
    """

    file: str
    checksum: str
    index: tuple[tuple[int, int, int], ...] | None = None

    def ranges(self) -> tuple[range, ...]:
        """Return the global indices along each axis."""
        return tuple(range(*axis) for axis in self.index or ())


@dataclass(frozen=True)
class TensorEntry:
    """The manifest entry of one tensor.

    Attributes:
        kind: "replicated", "sharded" or "per_rank".
        shape: global shape; for a ``per_rank`` tensor, the shape on each rank.
        dtype: name of the NumPy dtype.
        parts: a single part; or one for each rank that holds a part, in rank order.
        partition: for a sharded tensor, the partition rule.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]
    partition: str | None = None

    @property
    def arrays(self) -> int:
        """The number of arrays of ``shape``: one per rank for a ``per_rank`` tensor, otherwise 1."""
        return len(self.parts) if self.kind == "per_rank" else 1

    @property
    def bytes(self) -> int:
        """Bytes of all its arrays."""
        return self.arrays * math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def index_lengths(self) -> tuple[int, ...]:
        """Lengths of the axes that the indices of parts refer to: one axis of all elements if the rule is "flat"."""
        return (math.prod(self.shape),) if self.partition == FLAT else self.shape

    def __str__(self) -> str:
        rule = f" {printable(self.partition)}" if self.partition else ""
        return f"{self.dtype}{list(self.shape)} ({self.kind}{rule})"


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


def _axis(value: object) -> tuple[int, int, int]:
    """Schema of the indices along an axis, ``[start, stop, step]``."""
    if (type(value) is list or type(value) is tuple) and len(value) == 3:
        start, stop, step = value
        are_integers = type(start) is int and type(stop) is int and type(step) is int
        if are_integers and 0 <= start <= TOTAL_BYTES and 0 <= stop <= TOTAL_BYTES and 1 <= step <= TOTAL_BYTES:
            return start, stop, step
    raise FieldError(value, "[start, stop, step]: integers of at least 0, 0 and 1")


def _tensor(shape: tuple[int, ...], dtype: str, **others: Any) -> TensorEntry:
    if math.prod(max(1, axis) for axis in shape) * np.dtype(dtype).itemsize > TOTAL_BYTES:
        raise FieldError(list(shape), f"at most {TOTAL_BYTES} bytes", "shape")
    return TensorEntry(shape=shape, dtype=dtype, **others)


FILE_NAME = text(re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"), "the name of a file in this folder")
DIGEST = text(re.compile(r"[0-9a-f]{32}"), "32 hexadecimal digits")
_PART = typed(Part, file=FILE_NAME, checksum=DIGEST, index=optional(array(_axis, most=DIMENSIONS)))
TENSOR = typed(
    _tensor,
    kind=choice({"replicated": "replicated", "sharded": "sharded", "per_rank": "per_rank"}),
    shape=array(integer(), most=DIMENSIONS),
    dtype=choice({dtype.name: dtype.name for dtype in DTYPES.values()}),
    parts=array(_PART),
    partition=optional(text()),
)
