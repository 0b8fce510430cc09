"""Restore a checkpoint at any number of ranks. Every rank calls every function that communicates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import cluster
from hvdkit.checkpoint.chief_io import restore_through_chief
from hvdkit.checkpoint.entries import State, StateTensor
from hvdkit.checkpoint.folder import clear_damage, record_damage
from hvdkit.checkpoint.manifest import NAME, Manifest, shard_name
from hvdkit.checkpoint.matching import match
from hvdkit.checkpoint.rank_checks import agreed_manifest, agreed_state, run_on_all_ranks, run_on_chief
from hvdkit.checkpoint.reading import Reader
from hvdkit.collectives import broadcast
from hvdkit.data.aligned import tensor_of
from hvdkit.errors import CheckpointError, CorruptCheckpointError
from hvdkit.sharding.partition import FLAT
from hvdkit.sharding.variables import broadcast_variables


def restore(path: str | Path, into: Mapping[str, Any], *, gather: bool = False) -> dict[str, Any]:
    """Restore the checkpoint ``path`` at any number of ranks, verifying every byte read.

    Args:
        path: the checkpoint's folder.
        into: the state to restore: the one that was saved, or some of its keys. Variables, models, optimizers and
            generators are set in place.
        gather: as for ``hk.checkpoint.save``; the chief reads everything.

    Returns:
        ``into`` with arrays and plain values replaced by the saved ones.

    Raises:
        CheckpointError: the checkpoint does not exist, or is from another model; the state is unchanged.
        CorruptCheckpointError: bytes differ from those saved; the message names rank, file and rows. Some variables
            may already have been set.

    Examples:
        >>> import tempfile
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="ones")])
        >>> path = hk.checkpoint.save(hk.broadcast_object(tempfile.mkdtemp()), {"model": model, "step": 100})
        >>> model.set_weights([np.zeros((4, 2)), np.zeros(2)])
        >>> restored = hk.checkpoint.restore(path, {"model": model, "step": 0})  # sets the model's variables
        >>> restored["step"], model.layers[0].kernel.numpy().sum().item()
        (100, 8.0)
    """
    path = Path(path)
    state = agreed_state(into)
    try:
        manifest = agreed_manifest(path, gather=gather)
        names = run_on_all_ranks("names in a checkpoint", lambda: match(manifest, state, path))
        rank_values = _read_rank_values(path, manifest, state, gather)
        # Restore values first: if they do not fit, tensors are still unchanged.
        run_on_all_ranks(
            "values of a checkpoint", lambda: restore_values(path, manifest, state, rank_values, cluster.rank())
        )
        _restore_tensors(path, manifest, state, names, gather)
    except CorruptCheckpointError as damage:
        if cluster.is_chief():
            record_damage(path, str(damage))
        raise
    # Keys missing from `into` are not read. If fewer ranks restore than saved, some per-rank parts are not read either.
    is_all_read = set(names.values()) == set(manifest.variables) and cluster.size() >= manifest.size
    if is_all_read and cluster.is_chief():
        clear_damage(path)
    return {key: _replace(key, item, state.restored) for key, item in into.items()}


def restore_values(path: Path, manifest: Manifest, state: State, rank_values: Mapping[str, Any], rank: int) -> None:
    """Set the plain values of a state, and those of ``rank`` from ``rank_values`` if it saved some.

    Raises:
        CorruptCheckpointError: a value is none that such an object has; the message names the file and the value.
        CheckpointError: a value does not fit this run, e.g. another data set; the message names it.
    """
    for name, value in state.values.items():
        if value.per_rank and rank >= manifest.size:
            continue
        saved = rank_values[name] if value.per_rank else manifest.values[name]
        try:
            value.assign(saved)
        except CorruptCheckpointError as error:
            file = shard_name(rank, manifest.size) if value.per_rank else NAME
            raise CorruptCheckpointError(f"{path / file}: value {name!r}: {error}") from None
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise CheckpointError(f"{path}: {name!r} does not fit this run: {error}") from error


def _read_rank_values(path: Path, manifest: Manifest, state: State, gather: bool) -> Mapping[str, Any]:
    """Return the plain values saved for this rank; with ``gather`` the chief reads those of all ranks."""
    if not any(value.per_rank for value in state.values.values()):
        return {}
    ranks = range(cluster.size()) if gather else [cluster.rank()]

    def read() -> dict[int, Mapping[str, Any]]:
        with Reader(path, manifest) as reader:
            return {rank: reader.rank_values(rank) for rank in ranks if rank < manifest.size}

    return (run_on_chief if gather else run_on_all_ranks)("each rank's values", read).get(cluster.rank(), {})


def _restore_tensors(path: Path, manifest: Manifest, state: State, names: dict[str, str], gather: bool) -> None:
    rank = cluster.rank()
    size = cluster.size()
    # The chief reads tensors that are equal on all ranks, and broadcasts them.
    equal = [t for t in state.tensors.values() if _is_equal_on_all_ranks(t, manifest, size)]
    partitioned = [t for t in state.tensors.values() if not _is_equal_on_all_ranks(t, manifest, size)]

    def read() -> None:
        with Reader(path, manifest) as reader:
            for tensor in equal if rank == 0 else ():
                _assign(tensor, read_part(reader, tensor, names[tensor.name], 0, size))
            for tensor in () if gather else partitioned:
                _assign(tensor, read_part(reader, tensor, names[tensor.name], rank, size))

    run_on_all_ranks("tensors of a checkpoint", read)
    if gather:
        restore_through_chief(path, manifest, partitioned, names, _assign)
    if size > 1:
        if variables := [t.variable for t in equal if t.variable is not None]:
            broadcast_variables(variables)
        for tensor in equal:
            if tensor.variable is None:
                tensor.assign(np.asarray(broadcast(state.restored[tensor.name] if rank == 0 else tensor.read())))


def _is_equal_on_all_ranks(tensor: StateTensor, manifest: Manifest, size: int) -> bool:
    """Return True for replicated tensors, and for per-rank tensors that are reduced over the ranks that saved."""
    is_reduced = tensor.kind == "per_rank" and tensor.resize != "keep" and size != manifest.size
    return tensor.kind == "replicated" or is_reduced


def read_part(reader: Reader, tensor: StateTensor, name: str, rank: int, size: int) -> np.ndarray | None:
    """Return the part of a tensor for ``rank`` of ``size`` (all of a replicated one), or None to keep its value."""
    if tensor.kind == "replicated":
        return reader.whole(name)
    if tensor.kind == "per_rank":
        return reader.per_rank(name, rank, size, tensor.resize)
    assert tensor.index is not None
    return reader.sharded(name, tensor.index, flat=tensor.partition == FLAT)


def _assign(tensor: StateTensor, part: np.ndarray | None) -> None:
    if part is not None:
        on_host = tensor.variable is not None and "CPU" in tensor.variable.device.upper()
        tensor.assign(tensor_of(part) if on_host else part)


def _replace(name: str, item: Any, restored: Mapping[str, Any]) -> Any:
    """Return ``item`` with arrays and values replaced by the restored ones."""
    if isinstance(item, Mapping):
        return {key: _replace(f"{name}/{key}", part, restored) for key, part in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_replace(f"{name}/{number}", part, restored) for number, part in enumerate(item))
    return restored.get(name, item)
