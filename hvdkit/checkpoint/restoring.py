"""Restore a checkpoint at any number of ranks. Every rank calls every function that communicates."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.checkpoint.entries import Entry, State
from hvdkit.checkpoint.folder import forget_damage, note_damage
from hvdkit.checkpoint.link import chief_reads
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.matching import match
from hvdkit.checkpoint.reading import Reader
from hvdkit.checkpoint.saving import agreed_state, of_chief, together
from hvdkit.collectives import broadcast
from hvdkit.data.aligned import ALIGNMENT
from hvdkit.errors import CheckpointError, CorruptCheckpointError, describe
from hvdkit.sharding.partition import FLAT
from hvdkit.sharding.variables import broadcast_variables


def restore(path: str | Path, into: Mapping[str, Any], *, gather: bool = False) -> dict[str, Any]:
    """Restore the checkpoint ``path`` at any number of ranks, verifying every byte read.

    Args:
        path: the checkpoint's folder.
        into: the state to restore: the one that was saved, or some of its keys. Variables, models, optimizers and
            generators are set in place.
        gather: as for :func:`save`; the chief reads everything.

    Returns:
        ``into`` with arrays and plain values replaced by the saved ones.

    Raises:
        CheckpointError: the checkpoint does not exist, or is of another model; the state is unchanged.
        CorruptCheckpointError: bytes differ from those saved; the message names rank, file and rows. Some variables
            may already have been set.

    Example::

        restored = hk.checkpoint.restore("ckpt/step-000000100", {"model": model, "global_step": 0})
        print(restored["global_step"])
    """
    path, flat = Path(path), agreed_state(into)
    try:
        manifest = agreed_manifest(path, gather=gather)
        names = together("names in a checkpoint", lambda: match(manifest, flat, path))
        own = _own_values(path, manifest, flat, gather)
        # Restore values first: if they do not fit, tensors are still unchanged.
        together("values of a checkpoint", lambda: _restore_values(path, manifest, flat, own))
        _restore_tensors(path, manifest, flat, names, gather)
    except CorruptCheckpointError as damage:
        if cluster.is_chief():
            note_damage(path, str(damage))
        raise
    # Keys missing from `into` are not read. If fewer ranks restore than saved, some per-rank parts are not read either.
    is_all_read = set(names.values()) == set(manifest.variables) and cluster.size() >= manifest.size
    if is_all_read and cluster.is_chief():
        forget_damage(path)
    return {key: _filled(key, item, flat.found) for key, item in into.items()}


def agreed_manifest(path: Path, *, gather: bool = False) -> Manifest:
    """Return the manifest of ``path``, identical on every rank.

    Every rank reads it and compares its checksum with the chief's, because a manifest has an entry for each rank and
    tensor and may be large. With ``gather`` the chief sends it.

    Raises:
        CheckpointError: on every rank: ``Manifest.load`` fails or a rank reads a different manifest.
    """
    if gather:
        return of_chief("a manifest", lambda: Manifest.load(path))
    found: list[Manifest] = []

    def load() -> str:
        found.append(Manifest.load(path))
        return found[0].checksum

    checksum = of_chief("a manifest", load)

    def read() -> Manifest:
        if not found:
            with contextlib.suppress(OSError):
                list(path.parent.iterdir())  # makes a network file system refresh its cache
        manifest = found[0] if found else Manifest.parse(path)
        if manifest.checksum != checksum:
            here = cluster.cluster()
            got = f"another manifest on rank {here.rank} ({here.hosts[here.rank]}) than on rank 0 ({here.hosts[0]})"
            remedy = "restore from a file system that all ranks share, or pass gather=True"
            raise CheckpointError(describe(str(path), got, "one checkpoint", remedy))
        return manifest

    return together("every rank's manifest", read)


def _restore_values(path: Path, manifest: Manifest, flat: State, own: Mapping[str, Any]) -> None:
    for name, value in flat.values.items():
        try:
            if not value.per_rank:
                value.assign(manifest.values[name])
            elif cluster.rank() < manifest.size:
                value.assign(own[name])
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: {name!r} does not fit this run: {error}") from error


def _own_values(path: Path, manifest: Manifest, flat: State, gather: bool) -> Mapping[str, Any]:
    """Return the plain values saved for this rank; with ``gather`` the chief reads those of all ranks."""
    if not any(value.per_rank for value in flat.values.values()):
        return {}
    wanted = range(cluster.size()) if gather else [cluster.rank()]

    def read() -> dict[int, Mapping[str, Any]]:
        with Reader(path, manifest) as reader:
            return {rank: reader.rank_values(rank) for rank in wanted if rank < manifest.size}

    return (of_chief if gather else together)("each rank's values", read).get(cluster.rank(), {})


def _restore_tensors(path: Path, manifest: Manifest, flat: State, names: dict[str, str], gather: bool) -> None:
    rank, size = cluster.rank(), cluster.size()
    # The chief reads and broadcasts replicated tensors, and those reduced over all saved ranks' parts.
    sent = [e for e in flat.entries.values() if e.kind == "replicated" or _is_mean(e, manifest, size)]
    own = [e for e in flat.entries.values() if e.kind != "replicated" and not _is_mean(e, manifest, size)]

    def read() -> None:
        with Reader(path, manifest) as reader:
            for entry in sent if rank == 0 else ():
                name = names[entry.name]
                whole = reader.whole(name) if entry.kind == "replicated" else own_part(reader, entry, name, 0, size)
                assert whole is not None
                entry.assign(_taken_over(whole, entry))
            for entry in () if gather else own:
                _assign_own(entry, own_part(reader, entry, names[entry.name], rank, size))

    together("tensors of a checkpoint", read)
    if gather:
        chief_reads(path, manifest, own, names, _assign_own)
    if size > 1:
        broadcast_variables([e.variable for e in sent if e.variable is not None])
        for entry in sent:
            if entry.variable is None:
                entry.assign(np.asarray(broadcast(flat.found[entry.name] if rank == 0 else entry.read())))


def _is_mean(entry: Entry, manifest: Manifest, size: int) -> bool:
    """Return True if every rank gets the same value: the mean over the ranks that saved, or a share of their sum."""
    return entry.kind == "per_rank" and entry.resize != "keep" and size != manifest.size


def own_part(reader: Reader, entry: Entry, name: str, rank: int, size: int) -> np.ndarray | None:
    """Return the part of a sharded or per-rank tensor for ``rank`` of ``size``, or None to keep the current value."""
    if entry.kind == "per_rank":
        return reader.per_rank(name, rank, size, entry.resize)
    assert entry.index is not None
    return reader.sharded(name, entry.index, flat=entry.partition == FLAT)


def _assign_own(entry: Entry, part: np.ndarray | None) -> None:
    if part is not None:
        entry.assign(_taken_over(part, entry))


def _taken_over(array: np.ndarray, entry: Entry) -> Any:
    """Return ``array`` as a tensor that shares its memory if possible, to avoid a copy."""
    on_host = entry.variable is not None and "CPU" in entry.variable.device.upper()
    if not on_host or array.size == 0 or array.ctypes.data % ALIGNMENT:  # TensorFlow's kernels require alignment
        return array
    try:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    except (TypeError, ValueError, RuntimeError, BufferError, tf.errors.OpError):
        return array  # a dtype that DLPack does not support


def _filled(name: str, item: Any, found: Mapping[str, Any]) -> Any:
    """Return ``item`` with arrays and values replaced by the restored ones."""
    if isinstance(item, Mapping):
        return {key: _filled(f"{name}/{key}", part, found) for key, part in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_filled(f"{name}/{number}", part, found) for number, part in enumerate(item))
    return found.get(name, item)
