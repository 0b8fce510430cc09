"""The manifest: what a checkpoint holds, in which files, and by which checksums it is known to be whole."""

from __future__ import annotations

import datetime
import json
import math
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hvdkit._version import __version__
from hvdkit.checkpoint.files import naming_file, write_text
from hvdkit.checkpoint.tensorfile import FileRecord, TensorFile
from hvdkit.errors import CheckpointError, CorruptCheckpointError
from hvdkit.partition import FLAT

NAME = "manifest.json"
REPLICATED = "replicated.safetensors"
FORMAT, VERSION = "hvdkit checkpoint", 1


def shard_name(rank: int, size: int) -> str:
    """Return the name of a rank's file.

    Example:
        >>> shard_name(0, 4)
        'shard-00000-of-00004.safetensors'
    """
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor, or the whole of a replicated one.

    Attributes:
        file: the file's name in the checkpoint's folder.
        checksum: of the bytes, by blocks (see ``tensorfile``).
        index: of a sharded tensor, ``[start, stop, step]`` of the global indices along each axis; where the rule is
            "flat", of the elements in row-major order.
    """

    file: str
    checksum: str
    index: tuple[tuple[int, int, int], ...] | None = None

    def ranges(self) -> tuple[range, ...]:
        """Return the global indices along each axis."""
        return tuple(range(*axis) for axis in self.index or ())


@dataclass(frozen=True)
class Saved:
    """What the manifest says of one tensor.

    Attributes:
        kind: "replicated", "sharded" or "per_rank".
        shape: global shape; of a ``per_rank`` tensor, that of each rank's.
        dtype: name of the NumPy dtype.
        parts: one; or one for each rank that has some, in rank order.
        partition: of a sharded tensor, its rule.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]
    partition: str | None = None

    @property
    def indexed(self) -> tuple[int, ...]:
        """The lengths of the axes along which parts are indexed: where the rule is "flat", one axis of all elements."""
        return (math.prod(self.shape),) if self.partition == FLAT else self.shape

    def __str__(self) -> str:
        rule = f" {self.partition}" if self.partition else ""
        return f"{self.dtype}{list(self.shape)} ({self.kind}{rule})"


@dataclass
class Manifest:
    """A checkpoint's table of contents.

    Attributes:
        step: steps trained.
        size: ranks that saved it.
        variables: its tensors by name, in the order of the state.
        values: its plain values by name.
        rank_values: those that each rank has of its own, ``{name: [rank 0's, rank 1's, ...]}``.
        files: length and checksum of each file.
        created: UTC, ISO 8601.
        versions: of hvdkit, TensorFlow and others that wrote it.
    """

    step: int
    size: int
    variables: dict[str, Saved] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    rank_values: dict[str, list[Any]] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    created: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write ``folder/manifest.json`` and bring it to the disk.

        Raises:
            CheckpointError: it cannot be written.
            TypeError: a value is no JSON.
        """
        self.created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.versions = {"hvdkit": __version__, "numpy": np.__version__, "python": platform.python_version()}
        content = {"format": FORMAT, "format_version": VERSION, **asdict(self)}
        content["files"] = {n: {"bytes": r.bytes, "checksum": r.checksum} for n, r in self.files.items()}
        content["checksum"] = _checksum(content)
        write_text(folder / NAME, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read ``folder/manifest.json`` and look whether the files it names are there at their lengths.

        Raises:
            CheckpointError: ``folder`` is no checkpoint, or one of a newer hvdkit.
            CorruptCheckpointError: the manifest was changed after it was written, or a file is missing or cut short.
        """
        manifest = cls.parse(folder)
        for name, record in manifest.files.items():
            file = folder / name
            if not file.is_file():
                raise CorruptCheckpointError(f"{file}: missing, though {NAME} names it")
            if file.stat().st_size != record.bytes:
                raise CorruptCheckpointError(
                    f"{file}: has {file.stat().st_size} bytes, and {record.bytes} were written (cut short?)"
                )
        return manifest

    @classmethod
    def parse(cls, folder: Path) -> Manifest:
        """Read ``folder/manifest.json`` alone. Raises as :meth:`load` does."""
        file = folder / NAME
        if not file.is_file():
            raise CheckpointError(f"{folder}: is no checkpoint, it has no {NAME}; pass a folder such as step-000001200")
        try:
            with naming_file(file, "read"):
                content = json.loads(file.read_bytes())
            if content["format"] != FORMAT:
                raise CheckpointError(f"{file}: has the format {content['format']!r}, expected {FORMAT!r}")
            if content["format_version"] > VERSION:
                raise CheckpointError(
                    f"{file}: has format version {content['format_version']}, and this hvdkit {__version__} reads up "
                    f"to {VERSION}; upgrade hvdkit"
                )
            if content.pop("checksum") != _checksum(content):
                raise CorruptCheckpointError(f"{file}: was changed after it was written (checksum differs)")
            return cls._of(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{file}: is damaged ({type(error).__name__}: {error})") from error

    @classmethod
    def _of(cls, content: dict[str, Any]) -> Manifest:
        variables = {}
        for name, saved in content["variables"].items():
            parts = [
                Part(p["file"], p["checksum"], p["index"] and tuple(tuple(axis) for axis in p["index"]))
                for p in saved["parts"]
            ]
            variables[name] = Saved(
                saved["kind"], tuple(saved["shape"]), saved["dtype"], tuple(parts), saved["partition"]
            )
        files = {name: FileRecord(f["bytes"], f["checksum"], {}) for name, f in content["files"].items()}
        plain = {key: content[key] for key in ("step", "size", "values", "rank_values", "created", "versions")}
        return cls(variables=variables, files=files, **plain)

    def open(self, folder: Path, file: str) -> TensorFile:
        """Open one of the checkpoint's files, compared with what was written.

        Raises:
            CheckpointError: it cannot be read.
            CorruptCheckpointError: its length, header or checksums are not those that were written.
        """
        opened = TensorFile(folder / file, self.files[file])
        for name, saved in self.variables.items():
            for part in saved.parts:
                if part.file == file and (
                    name not in opened.layouts or opened.layouts[name].checksum() != part.checksum
                ):
                    opened.__exit__()
                    raise CorruptCheckpointError(f"{folder / file}: {name!r} is not what {NAME} says (checksum)")
        return opened


def _checksum(content: dict[str, Any]) -> str:
    """Return the checksum of everything in a manifest but this."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
