"""The manifest: a checkpoint's tensors, values and files, with the checksums that verify them."""

from __future__ import annotations

import datetime
import json
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hvdkit._version import __version__
from hvdkit.checkpoint.bounds import RANKS, STEPS, manifest_bytes, most_files
from hvdkit.checkpoint.files import RunPath, exists, names_in, read_bounded, read_errors, regular_sizes, write_text
from hvdkit.checkpoint.schema import (
    FieldError,
    Schema,
    array,
    checked,
    entry_name,
    integer,
    json_of,
    mapping,
    plain,
    text,
    too_many_values,
    typed,
)
from hvdkit.checkpoint.tensor_entry import DIGEST, FILE_NAME, TENSOR, Part, TensorEntry, coverage_problem
from hvdkit.checkpoint.tensorfile import FileRecord, TensorFile
from hvdkit.errors import CheckpointError, CorruptCheckpointError

NAME = "manifest.json"
FORMAT = "hvdkit checkpoint"
VERSION = 2
RANK_VALUES = "rank_values"
"""The key in a shard file's metadata that holds, as JSON, the values specific to its rank.

Version 1 kept the values of all ranks in the manifest, which every rank reads: about 10 kB of generator states per
rank.
"""


_STEP = re.compile(r"step-([0-9]{9,18})")
_SHARD = re.compile(r"shard-([0-9]{5,7})-of-([0-9]{5,7})(?:-[0-9a-f]+)?\.safetensors")


def shard_name(rank: int, size: int, suffix: str = "") -> str:
    """Return the name of a rank's file; ``suffix`` tells the files of a save from those that it replaces in a store.

    Example:
        >>> shard_name(0, 4), shard_name(0, 4, "-1f3c")
        ('shard-00000-of-00004.safetensors', 'shard-00000-of-00004-1f3c.safetensors')
    """
    return f"shard-{rank:05d}-of-{size:05d}{suffix}.safetensors"


def replicated_name(suffix: str = "") -> str:
    """Return the name of the file of replicated tensors; ``suffix`` as for :func:`shard_name`."""
    return f"replicated{suffix}.safetensors"


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder.

    Example:
        >>> step_name(1200)
        'step-000001200'
    """
    return f"step-{step:09d}"


def step_of(path: RunPath) -> int | None:
    """Return the step in a checkpoint's name, or None for another name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


@dataclass
class Manifest:
    """A checkpoint's table of contents.

    Attributes:
        step: steps trained.
        size: number of ranks that saved it.
        variables: its tensors by name, in the order of the state.
        values: its plain values by name.
        rank_values: names of the values that differ between ranks; each rank's values are in its own file, see
            :meth:`rank_values_in`.
        files: length and checksum of each file.
        created: UTC, ISO 8601.
        versions: versions of hvdkit, NumPy and Python that wrote it.
        checksum: checksum of all the above, as stored in the file; "" until it is written.
    """

    step: int
    size: int
    variables: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    rank_values: list[str] = field(default_factory=list)
    files: dict[str, FileRecord] = field(default_factory=dict)
    created: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    checksum: str = ""
    _version_1_values: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def write(self, folder: RunPath) -> None:
        """Write ``folder/manifest.json`` durably. Raises TypeError for a value that JSON cannot represent."""
        self.created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.versions = {"hvdkit": __version__, "numpy": np.__version__, "python": platform.python_version()}
        content: dict[str, object] = {"format": FORMAT, "format_version": VERSION}
        for key in ("step", "size", "values", "rank_values", "created", "versions"):
            content[key] = getattr(self, key)
        content["variables"] = {name: asdict(saved) for name, saved in self.variables.items()}
        content["files"] = {n: {"bytes": r.bytes, "checksum": r.checksum} for n, r in self.files.items()}
        content = json.loads(json.dumps(content))  # as it will be read: with strings as keys, arrays for tuples
        self.checksum = content["checksum"] = _checksum(content)
        written = json.dumps(content, indent=1) + "\n"
        self._check_readable(folder, content, written)
        write_text(folder / NAME, written)

    def _check_readable(self, folder: RunPath, content: dict[str, object], written: str) -> None:
        """Raise CheckpointError if :meth:`load` would refuse this manifest: then the state must not be saved so."""
        most = manifest_bytes(len(self.files))
        if len(written) > most:
            raise CheckpointError(
                f"{folder / NAME}: would have {len(written)} bytes, expected at most {most}; save fewer values"
            )
        if (problem := too_many_values(written)) is not None:
            raise CheckpointError(f"{folder / NAME}: cannot be saved: it {problem}; save large values as arrays")
        try:
            _CONTENT[VERSION](content)
        except FieldError as error:
            raise CheckpointError(f"{folder / NAME}: cannot be saved: {error}; change what is saved") from None
        for problem in self.part_problems():
            raise CheckpointError(f"{folder / NAME}: cannot be saved: {problem}; correct its local_index")

    @classmethod
    def load(cls, folder: RunPath) -> Manifest:
        """Read ``folder/manifest.json`` and check that its files exist and have the recorded lengths.

        Raises:
            CheckpointError: ``folder`` is not a checkpoint, or was written by a newer hvdkit.
            CorruptCheckpointError: the manifest is missing from a folder that is named like a step, cannot be read,
                was modified, or has wrong contents; or a file is missing or truncated.
        """
        manifest = cls.parse(folder)
        expected = {name: record.bytes for name, record in manifest.files.items()}
        for name, size in regular_sizes(folder, expected):
            if size is None:
                raise CorruptCheckpointError(f"{folder / name}: missing, though {NAME} names it")
            if size != expected[name]:
                raise CorruptCheckpointError(
                    f"{folder / name}: has {size} bytes, but {expected[name]} were written (truncated?)"
                )
        return manifest

    @classmethod
    def parse(cls, folder: RunPath, *, check_parts: bool = True) -> Manifest:
        """Read only ``folder/manifest.json``. Raises as :meth:`load` does.

        Args:
            folder: the checkpoint's folder.
            check_parts: raise if the parts of a tensor are wrong; otherwise the caller reports :meth:`part_problems`.
        """
        file = folder / NAME
        if not is_checkpoint(folder):
            raise CheckpointError(
                f"{folder}: is not a checkpoint: it has no {NAME}; pass a folder such as step-000001200"
            )
        with read_errors(folder):
            entries = len(names_in(folder))
        content = json_of(read_bounded(file, manifest_bytes(entries)), file)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            got = content.get("format") if isinstance(content, dict) else content
            raise CorruptCheckpointError(f"{file}: format: {FieldError(got, repr(FORMAT))}")
        version = checked(content.get("format_version"), integer(1), f"{file}: format_version")
        if version > VERSION:
            raise CheckpointError(
                f"{file}: has format version {version}, and this hvdkit {__version__} reads up to {VERSION}; upgrade "
                "hvdkit"
            )
        checksum = content.pop("checksum", None)
        try:
            is_unchanged = checksum == _checksum(content)
        except RecursionError:
            is_unchanged = False
        if not is_unchanged:
            raise CorruptCheckpointError(f"{file}: was changed after it was written (checksum differs)")
        manifest = checked(content, _CONTENT[version], file)
        manifest.checksum = checksum
        if manifest.step != (step := step_of(folder)) and step is not None:
            raise CorruptCheckpointError(f"{file}: step: got {manifest.step}, expected {step}, as in the folder's name")
        if len(manifest.files) > most_files(entries):
            raise CorruptCheckpointError(f"{file}: names {len(manifest.files)} files, and its folder has {entries}")
        for problem in manifest.part_problems() if check_parts else ():
            raise CorruptCheckpointError(f"{file}: {problem}")
        return manifest

    @classmethod
    def _of_version_1(cls, *, rank_values: dict[str, tuple[object, ...]], size: int, **others: Any) -> Manifest:
        for name, values in rank_values.items():
            if len(values) != size:
                raise FieldError(len(values), f"a value for each of {size} ranks", "rank_values", name)
        manifest = cls(rank_values=list(rank_values), size=size, **others)
        manifest._check_sizes()
        manifest._version_1_values = rank_values
        return manifest

    @classmethod
    def _of_version_2(cls, **fields: Any) -> Manifest:
        manifest = cls(**fields)
        manifest.rank_values = list(manifest.rank_values)
        for rank in range(manifest.size if manifest.rank_values else 0):  # ends at the first that is missing
            if rank not in manifest.shards:
                name = shard_name(rank, manifest.size)
                expected = f"the number of ranks that wrote a file: {name} is not among its files"
                raise FieldError(manifest.size, expected, "size")
        manifest._check_sizes()
        return manifest

    def _check_sizes(self) -> None:
        """Check that no tensor is larger than all files, whose lengths :meth:`load` compares with the real ones."""
        total = sum(file.bytes for file in self.files.values())
        for name, tensor in self.variables.items():
            if tensor.bytes > total:
                raise FieldError(
                    list(tensor.shape), f"at most the {total} bytes of all files", "variables", name, "shape"
                )

    def part_problems(self) -> Iterator[str]:
        """Yield a message for each tensor with missing, extra, overlapping or misplaced parts."""
        coverage_problems: dict[object, str | None] = {}  # by shape and partition
        for name, tensor in self.variables.items():
            problem = None
            if len({part.file for part in tensor.parts}) < len(tensor.parts):  # also bounds the comparison of parts
                problem = "has two parts in one file"
            elif tensor.kind == "sharded":
                key = (tensor.index_lengths, tuple(part.index for part in tensor.parts))
                if key not in coverage_problems:  # slots are partitioned like their variable
                    coverage_problems[key] = coverage_problem(tensor)
                problem = coverage_problems[key]
            elif len(tensor.parts) != (expected := self.size if tensor.kind == "per_rank" else 1):
                problem = f"has {len(tensor.parts)} parts, expected {expected}"
            elif any(part.index is not None for part in tensor.parts):
                problem = "has an index, expected none"
            if problem:
                yield f"{name!r}, {tensor}, {problem}"
            for rank, part in enumerate(tensor.parts):
                if part.file not in self.files:
                    yield f"{name!r} is in {part.file}, which is not among the files"
                elif tensor.kind == "per_rank" and rank < self.size and part.file != self.shards.get(rank):
                    expected_file = self.shards.get(rank, shard_name(rank, self.size))
                    yield f"{name!r} of rank {rank} is in {part.file}, expected {expected_file}"

    @cached_property
    def shards(self) -> dict[int, str]:
        """The names of the ranks' own files."""
        matches = (_SHARD.fullmatch(name) for name in self.files)
        return {int(match[1]): match[0] for match in matches if match and int(match[2]) == self.size}

    def rank_values_in(self, rank: int, file: TensorFile | None) -> Mapping[str, object]:
        """Return the values specific to ``rank``, by name, from its open ``file`` (None if it did not write one)."""
        if self._version_1_values:
            return {name: values[rank] for name, values in self._version_1_values.items()}
        if not self.rank_values:
            return {}
        path = shard_name(rank, self.size) if file is None else file.path
        values = json_of(file.metadata.get(RANK_VALUES, "{}") if file is not None else "{}", path)
        values = checked(values, mapping(plain), f"{path}: {RANK_VALUES}")
        if missing := [name for name in self.rank_values if name not in values]:
            raise CorruptCheckpointError(f"{path}: lacks values of rank {rank} ({missing[0]!r})")
        return {name: values[name] for name in self.rank_values}

    def files_with_rank_values(self) -> dict[str, int]:
        """Return the files that hold rank-specific values, mapped to the rank; empty in version 1."""
        has_values = self.rank_values and not self._version_1_values
        return {name: rank for rank, name in self.shards.items()} if has_values else {}

    @cached_property
    def parts_by_file(self) -> dict[str, list[tuple[str, Part]]]:
        """The parts in each file, as ``(tensor name, part)``."""
        parts: dict[str, list[tuple[str, Part]]] = {file: [] for file in self.files}
        for name, saved in self.variables.items():
            for part in saved.parts:
                parts.setdefault(part.file, []).append((name, part))
        return parts

    def mismatch(self, file: TensorFile, name: str, part: Part) -> str | None:
        """Return how the header of ``file`` differs from ``part`` of the tensor ``name``, or None."""
        location = file.locations.get(name)
        tensor = self.variables[name]
        if location is None:
            return f"{file.path}: {name!r} does not match {NAME} (it is not in the file)"
        shape = tensor.shape if part.index is None else tuple(map(len, part.ranges()))
        if location.dtype != np.dtype(tensor.dtype) or location.shape != shape:
            got = f"{location.dtype.name}{list(location.shape)}"
            expected = f"{tensor.dtype}{list(shape)}"
            return f"{file.path}: {name!r} does not match {NAME} (got {got}, expected {expected})"
        if location.checksum() != part.checksum:
            return f"{file.path}: {name!r} does not match {NAME} (checksum differs)"
        return None


def is_checkpoint(path: RunPath) -> bool:
    """Return True if ``path`` has a manifest, or is a local folder named like a step, which may be damaged.

    In a store, a checkpoint exists when its manifest does.
    """
    return exists(path / NAME) or (isinstance(path, Path) and step_of(path) is not None and exists(path))


def _checksum(content: dict[str, object]) -> str:
    """Return the checksum of a manifest's content, which excludes the checksum itself."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


_FIELDS: Mapping[str, Schema[object]] = {
    "step": integer(0, STEPS),
    "size": integer(1, RANKS),
    "variables": mapping(TENSOR),
    "values": mapping(plain),
    "files": mapping(typed(FileRecord.of, bytes=integer(), checksum=DIGEST), FILE_NAME),
    "created": text(),
    "versions": mapping(text(), text()),
}
_CONTENT: Mapping[int, Schema[Manifest]] = {
    1: typed(Manifest._of_version_1, rank_values=mapping(array(plain)), **_FIELDS),
    2: typed(Manifest._of_version_2, rank_values=array(entry_name), **_FIELDS),
}
