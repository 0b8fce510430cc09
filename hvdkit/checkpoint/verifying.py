"""Verify every byte of checkpoints against their checksums, and report all damage. Does not need TensorFlow."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

import numpy as np

from hvdkit.checkpoint.files import RunPath, exists, run_path
from hvdkit.checkpoint.folder import clear_damage, record_damage
from hvdkit.checkpoint.inspection import checkpoints_at, format_bytes
from hvdkit.checkpoint.manifest import NAME, Manifest
from hvdkit.checkpoint.tensor_entry import Part
from hvdkit.checkpoint.tensorfile import TensorFile, TensorLocation
from hvdkit.errors import CheckpointError, CorruptCheckpointError

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


def verify(path: str | RunPath, *, progress: Progress = lambda _: None) -> VerifiedCounts:
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
    for checkpoint in checkpoints_at(run_path(path, "path")):
        try:
            verifier = _Verifier(checkpoint, Manifest.parse(checkpoint, check_parts=False), progress)
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
    raise (CorruptCheckpointError if is_corrupt else CheckpointError)(*map(str, all_problems))


def bytes_to_verify(path: str | RunPath) -> int:
    """Return the number of bytes that :func:`verify` will report to ``progress`` if nothing is damaged."""
    total = 0
    for checkpoint in checkpoints_at(run_path(path, "path")):
        with contextlib.suppress(CheckpointError):  # verify reports it
            total += sum(tensor.bytes for tensor in Manifest.parse(checkpoint).variables.values())
    return total


class _Verifier:
    def __init__(self, path: RunPath, manifest: Manifest, progress: Progress):
        self._path = path
        self._manifest = manifest
        self._progress = progress
        self._with_values = manifest.files_with_rank_values()
        self._tensors = 0
        self._bytes = 0

    @property
    def counts(self) -> VerifiedCounts:
        return VerifiedCounts(1, len(self._manifest.files), self._tensors, self._bytes)

    def find_problems(self) -> list[CheckpointError]:
        """Read the whole checkpoint and return all problems."""
        problems: list[CheckpointError] = [
            CorruptCheckpointError(f"{self._path / NAME}: {problem}") for problem in self._manifest.part_problems()
        ]
        return problems + [problem for file in self._manifest.files for problem in self._check_file(file)]

    def _check_file(self, name: str) -> Iterator[CheckpointError]:
        path = self._path / name
        record = self._manifest.files[name]
        if not exists(path):
            yield CorruptCheckpointError(f"{path}: missing, though {NAME} names it")
            return
        try:
            # The header of a truncated file shows which tensors are affected.
            file = TensorFile(path, record, truncated=True)
        except CheckpointError as error:
            yield error
            return
        if file.size != record.bytes:
            yield CorruptCheckpointError(f"{path}: has {file.size} bytes, but {record.bytes} were written (truncated?)")
        with file:
            try:
                if name in self._with_values:
                    self._manifest.rank_values_in(self._with_values[name], file)
            except CorruptCheckpointError as error:
                yield error
            for tensor_name, part in self._manifest.parts_by_file[name]:
                yield from self._check_part(file, tensor_name, part)

    def _check_part(self, file: TensorFile, name: str, part: Part) -> Iterator[CheckpointError]:
        if (mismatch := self._manifest.mismatch(file, name, part)) is not None:
            yield CorruptCheckpointError(mismatch)
            return
        location = file.locations[name]
        self._tensors += 1
        self._bytes += location.bytes
        try:
            damaged = find_damaged_rows(file, name, location, self._progress)
        except CheckpointError as error:
            yield error
            return
        for start, stop in damaged:
            rows = f"rows {start} to {stop - 1}"
            yield CorruptCheckpointError(f"{file.path}: {name!r} is damaged in {rows} (checksum differs)")


def find_damaged_rows(
    file: TensorFile, name: str, location: TensorLocation, progress: Progress
) -> list[tuple[int, int]]:
    """Return the damaged intervals ``[start, stop)`` of a tensor's rows, at the granularity of checksum blocks."""
    damaged: list[tuple[int, int]] = []
    step = location.block_rows
    if location.row_bytes > file.size:  # a truncated file, in whose header any number may be
        progress(location.bytes)
        return [(0, location.rows)]
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
