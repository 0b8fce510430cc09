"""Verify every byte of checkpoints against their checksums, and report all damage. Does not need TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdkit.checkpoint.folder import forget_damage, note_damage
from hvdkit.checkpoint.inspecting import as_bytes, checkpoints_at
from hvdkit.checkpoint.manifest import NAME, Manifest, Part, TensorEntry
from hvdkit.checkpoint.tensorfile import FileRecord, TensorFile, TensorLocation
from hvdkit.errors import CheckpointError, CorruptCheckpointError
from hvdkit.sharding.partition import intersect

Progress = Callable[[int], None]


@dataclass(frozen=True)
class VerifiedCounts:
    """Counts of the data that was read and verified.

    Attributes:
        checkpoints: number of checkpoints.
        files: number of their files, excluding manifests.
        tensors: number of tensor parts in those files.
        bytes: tensor bytes read.
    """

    checkpoints: int = 0
    files: int = 0
    tensors: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return (
            f"whole: {self.checkpoints} checkpoint(s), {self.files} file(s), {self.tensors} tensor part(s), "
            f"{as_bytes(self.bytes)} read and compared"
        )


def verify(path: str | Path, *, progress: Progress = lambda _: None) -> VerifiedCounts:
    """Read every byte of a checkpoint, or of all checkpoints in a folder, and compare it with the checksums.

    Also checks that the manifest is intact, that each tensor has the recorded dtype and shape, and that the parts of a
    sharded tensor cover it exactly once. Peak memory is about 1 MiB, or one row. Like ``inspect``, it does not need
    ``hk.init()`` or Horovod. Damage is recorded next to the checkpoint, if the folder is writable, for ``latest`` and
    retention; the note of a checkpoint that is intact (again) is removed.

    Args:
        path: a checkpoint, a folder of checkpoints, or a ``logdir``.
        progress: called with the number of bytes of every piece read.

    Returns:
        Counts of what was read.

    Raises:
        CorruptCheckpointError: data is damaged; the message has a line per problem with its file, tensor and rows.
        CheckpointError: no checkpoint is found, or it cannot be read.

    Example::

        print(hk.checkpoint.verify("runs/mnist"))
    """
    found = checkpoints_at(Path(path))
    problems: list[CheckpointError] = []
    total = VerifiedCounts()
    for one in found:
        try:
            check = _Check(one, Manifest.parse(one), progress)
        except CheckpointError as error:
            problems.append(error)
            continue
        found_here = check.problems()
        if damage := [str(problem) for problem in found_here if isinstance(problem, CorruptCheckpointError)]:
            note_damage(one, damage[0])
        elif not found_here:
            forget_damage(one)
        problems += found_here
        total = VerifiedCounts(*(a + b for a, b in zip(_counts(total), _counts(check.read), strict=True)))
    if not problems:
        return total
    kind = CorruptCheckpointError if any(isinstance(p, CorruptCheckpointError) for p in problems) else CheckpointError
    raise kind("\n".join(str(problem) for problem in problems))


def _counts(read: VerifiedCounts) -> tuple[int, int, int, int]:
    return read.checkpoints, read.files, read.tensors, read.bytes


def bytes_at(path: str | Path) -> int:
    """Return the number of bytes that :func:`verify` will report to ``progress`` if nothing is damaged."""
    total = 0
    for one in checkpoints_at(Path(path)):
        try:
            total += sum(_part_bytes(s, p) for s in Manifest.parse(one).variables.values() for p in s.parts)
        except CheckpointError:
            continue  # verify reports it
    return total


def _part_shape(saved: TensorEntry, part: Part) -> tuple[int, ...]:
    return saved.shape if part.index is None else tuple(len(axis) for axis in part.ranges())


def _part_bytes(saved: TensorEntry, part: Part) -> int:
    return math.prod(_part_shape(saved, part)) * np.dtype(saved.dtype).itemsize


class _Check:
    """The check of one checkpoint."""

    def __init__(self, path: Path, manifest: Manifest, progress: Progress):
        self._path, self._manifest, self._progress = path, manifest, progress
        self._with_values = manifest.files_with_rank_values()
        self._covered: dict[object, str | None] = {}
        self._tensors, self._bytes = 0, 0

    @property
    def read(self) -> VerifiedCounts:
        return VerifiedCounts(1, len(self._manifest.files), self._tensors, self._bytes)

    def problems(self) -> list[CheckpointError]:
        """Return all problems found."""
        found = [CorruptCheckpointError(text) for text in self._wrong_parts()]
        for file in self._with_values.keys() - self._manifest.files.keys():
            found.append(CorruptCheckpointError(f"{self._path / NAME}: {file} is not among its files"))
        return found + [problem for file in self._manifest.files for problem in self._of_file(file)]

    def _wrong_parts(self) -> Iterator[str]:
        """Yield a message for each tensor with missing, extra or overlapping parts."""
        for name, saved in self._manifest.variables.items():
            wrong = None
            if saved.kind == "sharded":
                key = (saved.indexed, tuple(part.index for part in saved.parts))
                if key not in self._covered:  # slots are partitioned like their variable
                    self._covered[key] = uncovered(saved)
                wrong = self._covered[key]
            elif len(saved.parts) != (expected := self._manifest.size if saved.kind == "per_rank" else 1):
                wrong = f"has {len(saved.parts)} parts, expected {expected}"
            if wrong:
                yield f"{self._path / NAME}: {name!r}, {saved}, {wrong}"
            for part in saved.parts:
                if part.file not in self._manifest.files:
                    yield f"{self._path / NAME}: {name!r} is in {part.file}, which is not among the files"

    def _of_file(self, name: str) -> Iterator[CheckpointError]:
        path, record = self._path / name, self._manifest.files[name]
        if not path.is_file():
            yield CorruptCheckpointError(f"{path}: missing, though {NAME} names it")
            return
        there = path.stat().st_size
        if there != record.bytes:
            yield CorruptCheckpointError(f"{path}: has {there} bytes, and {record.bytes} were written (cut short?)")
        try:
            # The header of a truncated file shows which tensors are affected.
            file = TensorFile(path, FileRecord(there, record.checksum, {}))
        except CheckpointError as error:
            yield error
            return
        with file:
            try:
                if name in self._with_values:
                    self._manifest.rank_values_in(self._with_values[name], file)
            except CorruptCheckpointError as error:
                yield error
            for tensor, part in self._manifest.parts_in[name]:
                yield from self._of_part(file, tensor, self._manifest.variables[tensor], part)

    def _of_part(self, file: TensorFile, name: str, saved: TensorEntry, part: Part) -> Iterator[CheckpointError]:
        layout = file.layouts.get(name)
        expected = (_part_shape(saved, part), np.dtype(saved.dtype), part.checksum)
        if layout is None or (layout.shape, layout.dtype, layout.checksum()) != expected:
            yield CorruptCheckpointError(f"{file.path}: {name!r} is not what {NAME} says")
            return
        self._tensors += 1
        self._bytes += layout.rows * layout.row_bytes
        try:
            bad = damaged_rows(file, name, layout, self._progress)
        except CheckpointError as error:
            yield error
            return
        for start, stop in bad:
            rows = f"rows {start} to {stop - 1}"
            yield CorruptCheckpointError(f"{file.path}: {name!r} is damaged in {rows} (checksum differs)")


def damaged_rows(
    file: TensorFile, name: str, layout: TensorLocation, progress: Progress = lambda _: None
) -> list[tuple[int, int]]:
    """Return the damaged runs ``[start, stop)`` of a tensor's rows, at the granularity of checksum blocks.

    Raises:
        CheckpointError: the file cannot be read.
    """
    bad: list[tuple[int, int]] = []
    step = layout.block_rows
    buffer = np.empty((min(step, layout.rows), *layout.shape[1:]), layout.dtype)
    for first in range(0, layout.rows if layout.blocks else 0, step):
        last = min(first + step, layout.rows)
        if not _is_good(file, name, range(first, last), buffer[: last - first]):
            joins = bad and bad[-1][1] == first
            bad[-1:] = [(bad[-1][0], last)] if joins else [*bad[-1:], (first, last)]
        progress((last - first) * layout.row_bytes)
    return bad


def _is_good(file: TensorFile, name: str, rows: range, out: np.ndarray) -> bool:
    try:
        file.read(name, rows, out)
    except CorruptCheckpointError:
        return False
    return True


def uncovered(saved: TensorEntry) -> str | None:
    """Return a description of the problem if the parts of a sharded tensor do not cover it exactly once, else None.

    Parts cover the tensor if they are disjoint, within bounds, and have as many elements as the tensor.
    """
    boxes = [part.ranges() for part in saved.parts]
    for part, box in zip(saved.parts, boxes, strict=True):
        inside = [not axis or (axis[0] >= 0 and axis[-1] < n) for axis, n in zip(box, saved.indexed, strict=False)]
        if len(box) != len(saved.indexed) or not all(inside):
            return f"has a part in {part.file} that lies outside: {part.index}"
    if (twice := _overlap(boxes)) is not None:
        return f"has elements in {saved.parts[twice[0]].file} and again in {saved.parts[twice[1]].file}"
    held = sum(math.prod(map(len, box)) for box in boxes)
    whole = math.prod(saved.shape)
    return None if held == whole else f"is not covered: {whole - held} of {whole} elements are in no file"


def _overlap(boxes: list[tuple[range, ...]]) -> tuple[int, int] | None:
    """Return the (lower, higher) positions of two of ``boxes`` that share an element, or None.

    Tables are partitioned along one axis into contiguous runs, or round-robin with a common step. So boxes are sorted
    by remainder and start along the first axis on which they differ, and each is compared with the earlier boxes that
    extend to its start.
    """
    if not boxes or not boxes[0]:
        return (0, 1) if len(boxes) > 1 else None  # scalars
    axis = next((i for i, first in enumerate(boxes[0]) if any(box[i] != first for box in boxes)), 0)
    steps = {box[axis].step for box in boxes if len(box[axis]) > 1}
    step = steps.pop() if len(steps) == 1 else 1

    def place(number: int) -> tuple[int, int]:
        start = boxes[number][axis].start
        return start % step, start

    reaching: list[int] = []
    for number in sorted((n for n, box in enumerate(boxes) if all(box)), key=place):
        remainder, start = place(number)
        reaching = [n for n in reaching if place(n)[0] == remainder and boxes[n][axis][-1] >= start]
        for other in reaching:
            if all(intersect(x, y) for x, y in zip(boxes[other], boxes[number], strict=True)):
                return min(other, number), max(other, number)
        reaching.append(number)
    return None
