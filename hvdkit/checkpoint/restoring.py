"""Restore a checkpoint at any number of ranks. Every rank calls every function that communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.checkpoint.chief_io import receive_parts, send_parts
from hvdkit.checkpoint.entries import State, StateTensor
from hvdkit.checkpoint.files import RunPath, run_path
from hvdkit.checkpoint.folder import clear_damage, record_damage
from hvdkit.checkpoint.manifest import NAME, Manifest
from hvdkit.checkpoint.matching import match
from hvdkit.checkpoint.rank_checks import Opened, open_checkpoint, read_rank_values
from hvdkit.checkpoint.reading import Reader
from hvdkit.cluster.agreement import run_on_all_ranks
from hvdkit.cluster.lone_training import lone_training
from hvdkit.data.aligned import tensor_of
from hvdkit.errors import CheckpointError, CorruptCheckpointError
from hvdkit.sharding.variables import broadcast_compared


def restore(path: str | RunPath, into: Mapping[str, object], *, gather: bool = False) -> dict[str, Any]:
    """Restore the checkpoint ``path`` at any number of ranks, verifying every byte read.

    Args:
        path: the checkpoint's folder, or its URL in a store.
        into: the state to restore: the one that was saved, or some of its keys. Variables, models, optimizers and
            generators are set in place.
        gather: as for ``hk.checkpoint.save``; the chief reads everything.

    Returns:
        ``into`` with arrays and plain values replaced by the saved ones.

    Raises:
        CheckpointError: the checkpoint does not exist, or is from another model; the state is unchanged.
        CorruptCheckpointError: bytes differ from those saved; the message names rank, file and rows. Some variables
            and values may already have been set.

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
    path = run_path(path, "path")
    try:
        opened = open_checkpoint(path, into, gather=gather)
        names = match(opened.manifest, opened.state, path)  # equal on all ranks, like the error
        restore_parts = _restore_from_chief if gather else _restore_own
        _on_all_ranks("values of a checkpoint", lambda: _set_values(path, opened, gather))
        # Values first: if they do not fit, tensors are still unchanged.
        _on_all_ranks("tensors of a checkpoint", lambda: restore_parts(path, opened, names))
        _broadcast_equal(opened)
    except CorruptCheckpointError as damage:
        if cluster.is_chief():
            record_damage(path, str(damage))
        raise
    # Keys missing from `into` are not read. If fewer ranks restore than saved, some per-rank parts are not read either.
    is_all_read = set(names.values()) == set(opened.manifest.variables) and cluster.size() >= opened.manifest.size
    if is_all_read and cluster.is_chief():
        clear_damage(path)
    return {key: _replace(key, item, opened.state.restored) for key, item in into.items()}


def restore_values(
    path: RunPath, manifest: Manifest, state: State, rank_values: Mapping[str, object], rank: int
) -> None:
    """Set the plain values of a state, and those of ``rank`` from ``rank_values`` if it saved some.

    Raises:
        CorruptCheckpointError: a value is none that such an object has.
        CheckpointError: a value does not fit this run, e.g. another data set.
    """
    for name, value in state.values.items():
        if value.per_rank and rank >= manifest.size:
            continue
        saved = rank_values[name] if value.per_rank else manifest.values[name]
        try:
            value.assign(saved)
        except CorruptCheckpointError as error:
            file = manifest.shards[rank] if value.per_rank else NAME
            raise CorruptCheckpointError(f"{path / file}: value {name!r}: {error}") from None
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise CheckpointError(f"{path}: {name!r} does not fit this run: {error}") from error


def _on_all_ranks(kind: str, action: Callable[[], None]) -> None:
    run_on_all_ranks(cluster.exchange(), kind, action, error=CheckpointError)


def _set_values(path: RunPath, opened: Opened, gather: bool) -> None:
    """Set the plain values of this rank; with ``gather`` the chief has sent them."""
    rank = cluster.rank()
    manifest = opened.manifest
    values = opened.rank_values if gather else read_rank_values(path, manifest, opened.state, [rank])
    restore_values(path, manifest, opened.state, values.get(rank, {}), rank)


def _restore_own(path: RunPath, opened: Opened, names: Mapping[str, str]) -> None:
    """Read and set this rank's part of each tensor. The chief alone reads those that are equal on all ranks."""
    rank = cluster.rank()
    with Reader(path, opened.manifest) as reader:
        for tensor in opened.state.tensors.values():
            if rank == 0 or not _is_equal_on_all_ranks(tensor, opened.manifest):
                _assign(tensor, reader.part(tensor, names[tensor.name], rank, cluster.size()))


def _restore_from_chief(path: RunPath, opened: Opened, names: Mapping[str, str]) -> None:
    """Read all ranks' parts on the chief, and send them. Every rank calls it."""
    if not cluster.is_chief():
        receive_parts(list(opened.state.tensors.values()), _assign)
        return

    def parts() -> Iterator[tuple[int, StateTensor, np.ndarray]]:
        for rank, indices in enumerate(opened.indices):
            for own, index in zip(opened.state.tensors.values(), indices, strict=True):
                if rank == 0 or not _is_equal_on_all_ranks(own, opened.manifest):
                    part = reader.part(replace(own, index=index), names[own.name], rank, cluster.size())
                    if rank == 0:
                        _assign(own, part)
                    elif part is not None:
                        yield rank, own, part

    with Reader(path, opened.manifest) as reader:
        send_parts(parts())


def _broadcast_equal(opened: Opened) -> None:
    """Send the tensors that are equal on all ranks from the chief, which has read them."""
    equal = [t for t in opened.state.tensors.values() if _is_equal_on_all_ranks(t, opened.manifest)]
    if cluster.size() > 1:
        variables = [_array_variable(t, opened.state) if t.variable is None else t.variable for t in equal]
        broadcast_compared(variables)
        for tensor, variable in zip(equal, variables, strict=True):
            if tensor.variable is None:
                tensor.assign(np.asarray(variable.numpy()))  # a number stays an array
        lone_training().note_restored(variables)


def _array_variable(tensor: StateTensor, state: State) -> tf.Variable:
    """Return a variable with the values of an array: on the chief, the restored ones."""
    with tf.device("/CPU:0"):
        return tf.Variable(state.restored[tensor.name] if cluster.is_chief() else tensor.read())


def _is_equal_on_all_ranks(tensor: StateTensor, manifest: Manifest) -> bool:
    """Return True for replicated tensors, and for per-rank tensors that are reduced over the ranks that saved."""
    is_reduced = tensor.kind == "per_rank" and tensor.resize != "keep" and cluster.size() != manifest.size
    return tensor.kind == "replicated" or is_reduced


def _assign(tensor: StateTensor, part: np.ndarray | None) -> None:
    if part is not None:
        on_host = tensor.variable is not None and "CPU" in tensor.variable.device.upper()
        tensor.assign(tensor_of(part) if on_host else part)


def _replace(name: str, item: object, restored: Mapping[str, object]) -> object:
    """Return ``item`` with arrays and values replaced by the restored ones."""
    if isinstance(item, Mapping):
        return {key: _replace(f"{name}/{key}", part, restored) for key, part in item.items()}
    if type(item) is list or type(item) is tuple:
        return type(item)(_replace(f"{name}/{number}", part, restored) for number, part in enumerate(item))
    return restored.get(name, item)
