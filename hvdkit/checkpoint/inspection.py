"""Inspect a checkpoint or a folder of checkpoints without reading tensors. Does not need TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from hvdkit.checkpoint.files import RunPath, exists, run_path
from hvdkit.checkpoint.folder import checkpoints_in, find_damage, latest
from hvdkit.checkpoint.manifest import NAME, Manifest, is_checkpoint
from hvdkit.checkpoint.reading import Reader
from hvdkit.errors import CheckpointError, counted, describe, printable
from hvdkit.machine.terminal import aligned

_MAX_VALUE_LENGTH = 80  # characters of a value in the table


@dataclass(frozen=True)
class Variable:
    """One tensor of a checkpoint.

    Attributes:
        name: its key.
        kind: "replicated", "sharded" or "per_rank".
        shape: global shape; for a ``per_rank`` tensor, the shape on each rank.
        dtype: name of the NumPy dtype.
        partition: for a sharded tensor, the partition rule.
        parts: number of ranks that hold a part of it.
        bytes: total over all parts.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    partition: str | None
    parts: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """The contents of one checkpoint. Its ``str()`` is a table.

    Attributes:
        path: the checkpoint's folder.
        step: steps trained.
        ranks: number of ranks that saved it.
        created: UTC, ISO 8601.
        versions: versions of the packages that wrote it.
        bytes: total size of its files.
        damage: damage that is detectable without reading tensors, or None. See :func:`verify`.
        variables: its tensors.
        values: its plain values, such as the position in the data.
        rank_values: plain values of each rank, ``{name: [rank 0's, rank 1's, ...]}``.
    """

    path: RunPath
    step: int
    ranks: int
    created: str
    versions: dict[str, str]
    bytes: int
    damage: str | None
    variables: tuple[Variable, ...]
    values: dict[str, object]
    rank_values: dict[str, list[object]]

    def as_dict(self) -> dict[str, object]:
        """Return the attributes as JSON-compatible values."""
        return {**asdict(self), "path": str(self.path)}

    def __str__(self) -> str:
        versions = ", ".join(printable(f"{name} {version}") for name, version in self.versions.items())
        lines = [
            printable(self.path),
            f"step {self.step}, saved by {counted(self.ranks, 'rank')}, {printable(self.created)} ({versions})",
            f"{counted(len(self.variables), 'variable')}, {format_bytes(self.bytes)}",
            *([f"DAMAGED: {printable(self.damage)}"] if self.damage else []),
            "",
            *aligned([("variable", "kind", "shape", "dtype", "bytes"), *map(_row, self.variables)], right=(4,)),
        ]
        values = list(_leaves("", self.values))
        if values:
            lines += ["", *aligned([("value", ""), *values])]
        if self.rank_values:
            lines += ["", f"one per rank: {', '.join(map(printable, self.rank_values))}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Overview:
    """A summary of one checkpoint in a folder; attributes as in :class:`Inspection`, None if unknown."""

    path: RunPath
    step: int | None
    ranks: int | None
    created: str | None
    bytes: int | None
    damage: str | None


@dataclass(frozen=True)
class Listing:
    """The checkpoints of a folder, oldest first. Its ``str()`` is a table.

    Attributes:
        path: the folder.
        checkpoints: its checkpoints.
    """

    path: RunPath
    checkpoints: tuple[Overview, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the attributes as JSON-compatible values."""
        checkpoints = [{**asdict(overview), "path": str(overview.path)} for overview in self.checkpoints]
        return {"path": str(self.path), "checkpoints": checkpoints}

    def __str__(self) -> str:
        rows = [
            (
                printable(overview.path.name),
                *("?" if number is None else str(number) for number in (overview.step, overview.ranks)),
                "?" if overview.bytes is None else format_bytes(overview.bytes),
                printable(overview.created or "?"),
                f"DAMAGED: {printable(overview.damage)}" if overview.damage else "whole",
            )
            for overview in self.checkpoints
        ]
        header = ("checkpoint", "step", "ranks", "bytes", "created", "state")
        return "\n".join([printable(self.path), "", *aligned([header, *rows], right=(1, 2, 3))])


def inspect(path: str | RunPath) -> Inspection | Listing:
    """Return the contents of a checkpoint, or a listing of the checkpoints in a folder.

    Reads manifests, file lengths and, for a single checkpoint, file headers, but not tensors. Runs in one process
    without ``hk.init()`` or Horovod.

    Args:
        path: a checkpoint, a folder of checkpoints, or a ``logdir`` whose ``checkpoints`` folder contains them.

    Returns:
        An ``Inspection`` for a checkpoint, a ``Listing`` for a folder. Print it, use its attributes, or
            ``as_dict()``.

    Raises:
        CheckpointError: no checkpoint is found.
        CorruptCheckpointError: ``path`` is a checkpoint whose manifest cannot be read.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> logdir = hk.broadcast_object(tempfile.mkdtemp())  # one folder for all ranks
        >>> path = hk.checkpoint.save(f"{logdir}/step-000000100", {"kernel": np.ones((3, 2)), "epoch": 4})
        >>> found = hk.checkpoint.inspect(path)
        >>> found.step, found.values
        (100, {'epoch': 4})
        >>> for variable in found.variables:
        ...     print(variable.name, variable.kind, variable.shape, variable.dtype)
        kernel replicated (3, 2) float64
        >>> print(hk.checkpoint.inspect(logdir))
        /...
        <BLANKLINE>
        checkpoint      step  ranks  bytes  created                    state
        step-000000100   100      ...  176 B  ...  whole
    """
    path = run_path(path, "path")
    checkpoints = checkpoints_at(path)
    if checkpoints == [path]:
        return _inspect_one(path)
    return Listing(checkpoints[0].parent, tuple(map(_summarize, checkpoints)))


def checkpoints_at(path: RunPath) -> list[RunPath]:
    """Return ``[path]`` if it is a checkpoint, else those of the folder or ``logdir``, oldest first; raise if none."""
    if is_checkpoint(path):
        return [path]
    checkpoints = checkpoints_in(path)
    if not checkpoints:
        raise _not_found(path)
    return checkpoints


def newest_at(path: RunPath) -> RunPath:
    """Return ``path`` if it is a checkpoint, else the newest intact one of the folder or ``logdir``; raise if none."""
    if is_checkpoint(path):
        return path
    newest = latest(path)
    if newest is None:
        raise _not_found(path)
    return newest


def _not_found(path: RunPath) -> CheckpointError:
    expected = f"a checkpoint's folder, which has a {NAME}, or the logdir of a run that has saved"
    if exists(path):
        remedy = "correct the path, or, if the run has just begun, wait for its first save"
        return CheckpointError(describe("path", f"{path}, which contains no intact checkpoint", expected, remedy))
    return CheckpointError(describe("path", f"{path}, which does not exist", expected, "correct the path"))


def _inspect_one(path: RunPath) -> Inspection:
    manifest = Manifest.parse(path)
    damage = find_damage(path)
    rank_values: dict[str, list[object]] = {}
    try:
        with Reader(path, manifest) as reader:
            rank_values = reader.all_rank_values()
    except CheckpointError as error:
        damage = damage or str(error)
    return Inspection(
        path=path,
        step=manifest.step,
        ranks=manifest.size,
        created=manifest.created,
        versions=manifest.versions,
        bytes=_total_bytes(manifest),
        damage=damage,
        variables=tuple(
            Variable(name, entry.kind, entry.shape, entry.dtype, entry.partition, len(entry.parts), entry.bytes)
            for name, entry in manifest.variables.items()
        ),
        values=manifest.values,
        rank_values=rank_values,
    )


def _summarize(path: RunPath) -> Overview:
    try:
        manifest = Manifest.parse(path)
    except CheckpointError as error:
        return Overview(path, None, None, None, None, str(error))
    return Overview(path, manifest.step, manifest.size, manifest.created, _total_bytes(manifest), find_damage(path))


def _total_bytes(manifest: Manifest) -> int:
    return sum(record.bytes for record in manifest.files.values())


def _row(variable: Variable) -> tuple[str, ...]:
    kinds = {"per_rank": f"one per rank ({variable.parts})", "sharded": f"sharded {printable(variable.partition)}"}
    shape = " x ".join(map(str, variable.shape)) or "scalar"
    kind = kinds.get(variable.kind, variable.kind)
    return printable(variable.name), kind, shape, variable.dtype, format_bytes(variable.bytes)


def _leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield ``(name, value)`` for every leaf of nested mappings, with values truncated to one line."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaves(f"{name}/{key}" if name else str(key), child)
    else:
        text = json.dumps(value)
        yield printable(name), text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 4]} ..."


def format_bytes(count: int) -> str:
    """Return a human-readable number of bytes.

    Example:
        >>> format_bytes(17), format_bytes(2_500_000)
        ('17 B', '2.5 MB')
    """
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count} B" if power == 0 else f"{count / 1000**power:.1f} {'kMGT'[power - 1]}B"
