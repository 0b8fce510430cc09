"""The manifest: a checkpoint's tensors, values and files, with the checksums that verify them."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hvdkit._version import __version__
from hvdkit.checkpoint.files import checkpoint_errors, write_text
from hvdkit.checkpoint.tensorfile import FileRecord, TensorFile
from hvdkit.errors import CheckpointError, CorruptCheckpointError
from hvdkit.sharding.partition import FLAT

NAME = "manifest.json"
REPLICATED = "replicated.safetensors"
FORMAT, VERSION = "hvdkit checkpoint", 2
RANK_VALUES = "rank_values"
"""The key in a shard file's metadata that holds, as JSON, the values specific to its rank.

Version 1 kept the values of all ranks in the manifest, which every rank reads: about 10 kB of generator states per
rank.
"""


def shard_name(rank: int, size: int) -> str:
    """Return the name of a rank's file.

    Example:
        >>> shard_name(0, 4)
        'shard-00000-of-00004.safetensors'
    """
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


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
    def index_lengths(self) -> tuple[int, ...]:
        """Lengths of the axes that the indices of parts refer to: one axis of all elements if the rule is "flat"."""
        return (math.prod(self.shape),) if self.partition == FLAT else self.shape

    def __str__(self) -> str:
        rule = f" {self.partition}" if self.partition else ""
        return f"{self.dtype}{list(self.shape)} ({self.kind}{rule})"


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
    values: dict[str, Any] = field(default_factory=dict)
    rank_values: list[str] = field(default_factory=list)
    files: dict[str, FileRecord] = field(default_factory=dict)
    created: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    checksum: str = ""
    _version_1_values: dict[str, list[Any]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write ``folder/manifest.json`` and sync it to disk.

        Raises:
            CheckpointError: it cannot be written.
            TypeError: a value cannot be represented as JSON.
        """
        self.created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.versions = {"hvdkit": __version__, "numpy": np.__version__, "python": platform.python_version()}
        content = {"format": FORMAT, "format_version": VERSION}
        content |= {key: getattr(self, key) for key in _UNCHANGED}
        content["variables"] = {name: asdict(saved) for name, saved in self.variables.items()}
        content["files"] = {n: {"bytes": r.bytes, "checksum": r.checksum} for n, r in self.files.items()}
        self.checksum = content["checksum"] = _checksum(content)
        write_text(folder / NAME, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read ``folder/manifest.json`` and check that its files exist and have the recorded lengths.

        Raises:
            CheckpointError: ``folder`` is not a checkpoint, or was written by a newer hvdkit.
            CorruptCheckpointError: the manifest was modified, or a file is missing or truncated.
        """
        manifest = cls.parse(folder)
        for name, record in manifest.files.items():
            file = folder / name
            if not file.is_file():
                raise CorruptCheckpointError(f"{file}: missing, though {NAME} names it")
            if file.stat().st_size != record.bytes:
                raise CorruptCheckpointError(
                    f"{file}: has {file.stat().st_size} bytes, but {record.bytes} were written (truncated?)"
                )
        return manifest

    @classmethod
    def parse(cls, folder: Path) -> Manifest:
        """Read only ``folder/manifest.json``. Raises as :meth:`load` does."""
        file = folder / NAME
        if not file.is_file():
            raise CheckpointError(
                f"{folder}: is not a checkpoint: it has no {NAME}; pass a folder such as step-000001200"
            )
        try:
            with checkpoint_errors(file, "read"):
                content = json.loads(file.read_bytes())
            if content["format"] != FORMAT:
                raise CheckpointError(f"{file}: has the format {content['format']!r}, expected {FORMAT!r}")
            if content["format_version"] > VERSION:
                raise CheckpointError(
                    f"{file}: has format version {content['format_version']}, and this hvdkit {__version__} reads up "
                    f"to {VERSION}; upgrade hvdkit"
                )
            checksum = content.pop("checksum")
            if checksum != _checksum(content):
                raise CorruptCheckpointError(f"{file}: was changed after it was written (checksum differs)")
            return cls._from_json(content, checksum)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{file}: is damaged ({type(error).__name__}: {error})") from error

    @classmethod
    def _from_json(cls, content: dict[str, Any], checksum: str) -> Manifest:
        variables = {}
        for name, saved in content["variables"].items():
            parts = [
                Part(p["file"], p["checksum"], p["index"] and tuple(tuple(axis) for axis in p["index"]))
                for p in saved["parts"]
            ]
            variables[name] = TensorEntry(
                saved["kind"], tuple(saved["shape"]), saved["dtype"], tuple(parts), saved["partition"]
            )
        files = {name: FileRecord(f["bytes"], f["checksum"], {}) for name, f in content["files"].items()}
        for name in [*files, *(part.file for saved in variables.values() for part in saved.parts)]:
            if name in ("", ".", "..") or {"/", "\0"} & set(name):
                raise ValueError(f"it names the file {name!r}, which is not in this folder")
        step, size = content["step"], content["size"]
        if type(step) is not int or type(size) is not int or step < 0 or size < 1:
            raise ValueError(f"step {step!r} and size {size!r} are not a step >= 0 and a size >= 1")
        manifest = cls(variables=variables, files=files, checksum=checksum, **{key: content[key] for key in _UNCHANGED})
        if content["format_version"] == 1:
            manifest._version_1_values = content["rank_values"]
            manifest.rank_values = list(content["rank_values"])
        return manifest

    def rank_values_in(self, rank: int, file: TensorFile | None) -> Mapping[str, Any]:
        """Return the values specific to ``rank``, by name, from its open ``file`` (None if it did not write one).

        Raises:
            CorruptCheckpointError: they differ from those written.
        """
        if self._version_1_values:
            return {name: values[rank] for name, values in self._version_1_values.items()}
        if not self.rank_values:
            return {}
        try:
            values = json.loads(file.metadata[RANK_VALUES] if file is not None else "{}")
            return {name: values[name] for name in self.rank_values}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            path = shard_name(rank, self.size) if file is None else file.path
            raise CorruptCheckpointError(f"{path}: lacks values of rank {rank} ({error!r})") from error

    def files_with_rank_values(self) -> dict[str, int]:
        """Return the files that hold rank-specific values, mapped to the rank; empty in version 1."""
        ranks = range(self.size if self.rank_values and not self._version_1_values else 0)
        return {shard_name(rank, self.size): rank for rank in ranks}

    @cached_property
    def parts_by_file(self) -> dict[str, list[tuple[str, Part]]]:
        """The parts in each file, as ``(tensor name, part)``."""
        parts: dict[str, list[tuple[str, Part]]] = {file: [] for file in self.files}
        for name, saved in self.variables.items():
            for part in saved.parts:
                parts.setdefault(part.file, []).append((name, part))
        return parts

    def open(self, folder: Path, file: str) -> TensorFile:
        """Open one of the checkpoint's files and verify its header.

        Raises:
            CheckpointError: it cannot be read.
            CorruptCheckpointError: its length, header or checksums differ from those written.
        """
        if file not in self.files:
            raise CorruptCheckpointError(f"{folder / NAME}: {file} is not among its files")
        tensor_file = TensorFile(folder / file, self.files[file])
        for name, part in self.parts_by_file[file]:
            location = tensor_file.locations.get(name)
            if location is None or location.checksum() != part.checksum:
                tensor_file.close()
                raise CorruptCheckpointError(f"{folder / file}: {name!r} does not match {NAME} (checksum differs)")
        return tensor_file


_UNCHANGED = ("step", "size", "values", "rank_values", "created", "versions")


def _checksum(content: dict[str, Any]) -> str:
    """Return the checksum of a manifest's content, which excludes the checksum itself."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
