"""Reading every byte of checkpoints against their checksums, and telling all the damage. Needs no TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdkit.checkpoint.folder import forget_damage, note_damage
from hvdkit.checkpoint.inspecting import as_bytes, checkpoints_at
from hvdkit.checkpoint.manifest import NAME, Manifest, Part, Saved
from hvdkit.checkpoint.tensorfile import FileRecord, Layout, TensorFile
from hvdkit.errors import CheckpointError, CorruptCheckpointError
from hvdkit.partition import intersect

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Verified:
    """What was read and found to be whole.

    Attributes:
        checkpoints: how many.
        files: in them, manifests not counted.
        tensors: parts of tensors in those files.
        bytes: of tensors, all of them read.
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


def verify(path: str | Path, *, progress: Progress = lambda _: None) -> Verified:
    """Read every byte of a checkpoint, or of all in a folder, and compare it with the checksums.

    Also sees that the manifest is what was written, that each tensor has the dtype and shape that the manifest says,
    and that the parts of a sharded tensor cover it exactly once. Memory: about 1 MiB, or one row. Works anywhere, as
    ``inspect`` does. Damage is noted next to the checkpoint, if that can be written, so that ``latest`` and retention
    know it; the note of a checkpoint that is whole (again) is removed.

    Args:
        path: a checkpoint; or a folder of checkpoints, or a ``logdir``.
        progress: called with the bytes of every piece that was read.

    Returns:
        What was read.

    Raises:
        CorruptCheckpointError: with a line for everything that is damaged, and its file, tensor and rows.
        CheckpointError: there is no checkpoint, or it cannot be read.

    Example::

        print(hk.checkpoint.verify("runs/mnist"))
    """
    found = checkpoints_at(Path(path))
    problems: list[CheckpointError] = []
    total = Verified()
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
        total = Verified(*(a + b for a, b in zip(_counts(total), _counts(check.read), strict=True)))
    if not problems:
        return total
    kind = CorruptCheckpointError if any(isinstance(p, CorruptCheckpointError) for p in problems) else CheckpointError
    raise kind("\n".join(str(problem) for problem in problems))


def _counts(read: Verified) -> tuple[int, int, int, int]:
    return read.checkpoints, read.files, read.tensors, read.bytes


def bytes_at(path: str | Path) -> int:
    """Return how many bytes :func:`verify` will tell its ``progress`` of, if nothing is damaged."""
    total = 0
    for one in checkpoints_at(Path(path)):
        try:
            total += sum(_part_bytes(s, p) for s in Manifest.parse(one).variables.values() for p in s.parts)
        except CheckpointError:
            continue  # verify will tell
    return total


def _part_shape(saved: Saved, part: Part) -> tuple[int, ...]:
    return saved.shape if part.index is None else tuple(len(axis) for axis in part.ranges())


def _part_bytes(saved: Saved, part: Part) -> int:
    return math.prod(_part_shape(saved, part)) * np.dtype(saved.dtype).itemsize


class _Check:
    """The check of one checkpoint."""

    def __init__(self, path: Path, manifest: Manifest, progress: Progress):
        self._path, self._manifest, self._progress = path, manifest, progress
        self._with_values = manifest.files_with_rank_values()
        self._covered: dict[object, str | None] = {}
        self._tensors, self._bytes = 0, 0

    @property
    def read(self) -> Verified:
        return Verified(1, len(self._manifest.files), self._tensors, self._bytes)

    def problems(self) -> list[CheckpointError]:
        """Return everything that is wrong."""
        found = [CorruptCheckpointError(text) for text in self._wrong_parts()]
        for file in self._with_values.keys() - self._manifest.files.keys():
            found.append(CorruptCheckpointError(f"{self._path / NAME}: {file} is not among its files"))
        return found + [problem for file in self._manifest.files for problem in self._of_file(file)]

    def _wrong_parts(self) -> Iterator[str]:
        """Tell of tensors whose parts are not those that they should have."""
        for name, saved in self._manifest.variables.items():
            wrong = None
            if saved.kind == "sharded":
                key = (saved.indexed, tuple(part.index for part in saved.parts))
                if key not in self._covered:  # slots are cut as their variable is
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
            # The header of a file that was cut short tells which tensors were cut.
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

    def _of_part(self, file: TensorFile, name: str, saved: Saved, part: Part) -> Iterator[CheckpointError]:
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
    file: TensorFile, name: str, layout: Layout, progress: Progress = lambda _: None
) -> list[tuple[int, int]]:
    """Return the runs ``[start, stop)`` of a tensor's rows that are damaged, to the block of rows with one checksum.

    Raises:
        CheckpointError: the disk does not give the bytes.
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


def uncovered(saved: Saved) -> str | None:
    """Return what is wrong with the parts of a sharded tensor; None if they cover it exactly once.

    Parts that do not overlap, lie inside and have as many elements as the whole cover it.
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
    """Return two of ``boxes`` that have an element in common, as (lower, higher) position, or None.

    Tables are cut along one axis into runs, or dealt out in turn with one step. So boxes are sorted along the first
    axis along which they differ, by remainder and start: each is compared with those before it that reach it.
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
