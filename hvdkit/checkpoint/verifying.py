"""Verify every byte of checkpoints against their checksums, and report all damage. Does not need TensorFlow."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from hvdkit.checkpoint.folder import clear_damage, record_damage
from hvdkit.checkpoint.inspection import checkpoints_at, format_bytes
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
            f"intact: {self.checkpoints} checkpoint(s), {self.files} file(s), {self.tensors} tensor part(s), "
            f"{format_bytes(self.bytes)} read and compared"
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

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> path = hk.checkpoint.save(hk.broadcast_object(tempfile.mkdtemp()), {"kernel": np.ones((3, 2))})
        >>> hk.checkpoint.verify(path)
        VerifiedCounts(checkpoints=1, files=1, tensors=1, bytes=48)
    """
    all_problems: list[CheckpointError] = []
    total = VerifiedCounts()
    for checkpoint in checkpoints_at(Path(path)):
        try:
            verifier = _Verifier(checkpoint, Manifest.parse(checkpoint), progress)
        except CheckpointError as error:
            all_problems.append(error)
            continue
        problems = verifier.find_problems()
        if damage := [str(problem) for problem in problems if isinstance(problem, CorruptCheckpointError)]:
            record_damage(checkpoint, damage[0])
        elif not problems:
            clear_damage(checkpoint)
        all_problems += problems
        total = VerifiedCounts(*map(operator.add, astuple(total), astuple(verifier.counts)))
    if not all_problems:
        return total
    is_corrupt = any(isinstance(problem, CorruptCheckpointError) for problem in all_problems)
    raise (CorruptCheckpointError if is_corrupt else CheckpointError)("\n".join(map(str, all_problems)))


def bytes_to_verify(path: str | Path) -> int:
    """Return the number of bytes that :func:`verify` will report to ``progress`` if nothing is damaged."""
    total = 0
    for checkpoint in checkpoints_at(Path(path)):
        with contextlib.suppress(CheckpointError):  # verify reports it
            for tensor in Manifest.parse(checkpoint).variables.values():
                elements = sum(math.prod(_part_shape(tensor, part)) for part in tensor.parts)
                total += elements * np.dtype(tensor.dtype).itemsize
    return total


def _part_shape(tensor: TensorEntry, part: Part) -> tuple[int, ...]:
    return tensor.shape if part.index is None else tuple(len(axis) for axis in part.ranges())


class _Verifier:
    """Verifies one checkpoint."""

    def __init__(self, path: Path, manifest: Manifest, progress: Progress):
        self._path, self._manifest, self._progress = path, manifest, progress
        self._with_values = manifest.files_with_rank_values()
        self._coverage_problems: dict[object, str | None] = {}  # by shape and partition
        self._tensors, self._bytes = 0, 0

    @property
    def counts(self) -> VerifiedCounts:
        return VerifiedCounts(1, len(self._manifest.files), self._tensors, self._bytes)

    def find_problems(self) -> list[CheckpointError]:
        """Read the whole checkpoint and return all problems."""
        problems = [CorruptCheckpointError(message) for message in self._check_parts()]
        for file in self._with_values.keys() - self._manifest.files.keys():
            problems.append(CorruptCheckpointError(f"{self._path / NAME}: {file} is not among its files"))
        return problems + [problem for file in self._manifest.files for problem in self._check_file(file)]

    def _check_parts(self) -> Iterator[str]:
        """Yield a message for each tensor with missing, extra or overlapping parts."""
        for name, tensor in self._manifest.variables.items():
            problem = None
            if tensor.kind == "sharded":
                key = (tensor.index_lengths, tuple(part.index for part in tensor.parts))
                if key not in self._coverage_problems:  # slots are partitioned like their variable
                    self._coverage_problems[key] = coverage_problem(tensor)
                problem = self._coverage_problems[key]
            elif len(tensor.parts) != (expected := self._manifest.size if tensor.kind == "per_rank" else 1):
                problem = f"has {len(tensor.parts)} parts, expected {expected}"
            if problem:
                yield f"{self._path / NAME}: {name!r}, {tensor}, {problem}"
            for part in tensor.parts:
                if part.file not in self._manifest.files:
                    yield f"{self._path / NAME}: {name!r} is in {part.file}, which is not among the files"

    def _check_file(self, name: str) -> Iterator[CheckpointError]:
        path, record = self._path / name, self._manifest.files[name]
        if not path.is_file():
            yield CorruptCheckpointError(f"{path}: missing, though {NAME} names it")
            return
        size = path.stat().st_size
        if size != record.bytes:
            yield CorruptCheckpointError(f"{path}: has {size} bytes, but {record.bytes} were written (truncated?)")
        try:
            # The header of a truncated file shows which tensors are affected.
            file = TensorFile(path, FileRecord(size, record.checksum, {}))
        except CheckpointError as error:
            yield error
            return
        with file:
            try:
                if name in self._with_values:
                    self._manifest.rank_values_in(self._with_values[name], file)
            except CorruptCheckpointError as error:
                yield error
            for tensor_name, part in self._manifest.parts_by_file[name]:
                yield from self._check_part(file, tensor_name, self._manifest.variables[tensor_name], part)

    def _check_part(self, file: TensorFile, name: str, tensor: TensorEntry, part: Part) -> Iterator[CheckpointError]:
        location = file.locations.get(name)
        expected = (_part_shape(tensor, part), np.dtype(tensor.dtype), part.checksum)
        if location is None or (location.shape, location.dtype, location.checksum()) != expected:
            yield CorruptCheckpointError(f"{file.path}: {name!r} does not match {NAME}")
            return
        self._tensors += 1
        self._bytes += location.rows * location.row_bytes
        try:
            damaged = find_damaged_rows(file, name, location, self._progress)
        except CheckpointError as error:
            yield error
            return
        for start, stop in damaged:
            rows = f"rows {start} to {stop - 1}"
            yield CorruptCheckpointError(f"{file.path}: {name!r} is damaged in {rows} (checksum differs)")


def find_damaged_rows(
    file: TensorFile, name: str, location: TensorLocation, progress: Progress = lambda _: None
) -> list[tuple[int, int]]:
    """Return the damaged intervals ``[start, stop)`` of a tensor's rows, at the granularity of checksum blocks.

    Raises:
        CheckpointError: the file cannot be read.
    """
    damaged: list[tuple[int, int]] = []
    step = location.block_rows
    buffer = np.empty((min(step, location.rows), *location.shape[1:]), location.dtype)
    for start in range(0, location.rows if location.blocks else 0, step):
        stop = min(start + step, location.rows)
        try:
            file.read(name, range(start, stop), buffer[: stop - start])
        except CorruptCheckpointError:
            extends_last = damaged and damaged[-1][1] == start
            damaged.append((damaged.pop()[0] if extends_last else start, stop))
        progress((stop - start) * location.row_bytes)
    return damaged


def coverage_problem(tensor: TensorEntry) -> str | None:
    """Return None if the parts of a sharded tensor cover it exactly once, else a description of the problem.

    Parts cover the tensor if they are disjoint, within bounds, and have as many elements as the tensor.
    """
    boxes, lengths = [part.ranges() for part in tensor.parts], tensor.index_lengths
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
