"""Match tensors of a checkpoint to tensors of the state: by name, or by position if Keras renumbered layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from hvdkit.checkpoint.entries import State, StateTensor, key_of
from hvdkit.checkpoint.files import RunPath
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.tensor_entry import TensorEntry
from hvdkit.errors import CheckpointError

_NUMBER = re.compile(r"_\d+(?=/|$|_)")


def without_numbers(name: str) -> str:
    """Remove the numbers that Keras appends to layer names.

    Example:
        >>> without_numbers("model/sequential_3/dense_12/kernel")
        'model/sequential/dense/kernel'
    """
    return _NUMBER.sub("", name)


def match(manifest: Manifest, state: State, path: RunPath) -> dict[str, str]:
    """Return the saved name of every tensor in ``state``.

    Each key of the state must match completely; saved keys that the state does not have are ignored. Equal names
    match, in any order. Keras numbers layers in creation order (``dense``, ``dense_1``), so the same model may have
    different names; then tensors are matched by position, and names must be equal except for numbers. The
    CheckpointError about a checkpoint of another model names the first tensor that differs.
    """
    pairs: dict[str, str] = {}
    all_saved = _by_key(manifest.variables)
    for key, current in _by_key(state.tensors).items():
        if key not in all_saved:
            raise CheckpointError(
                f"{path}: contains no {key!r}, only {sorted(all_saved)}. Restore what was saved, or pass another logdir"
            )
        saved = all_saved[key]
        matches = _match_by_name(current, saved) or _match_by_position(current, saved, path)
        for name, saved_name in matches.items():
            _check_match(current[name], saved[saved_name], saved_name, path)
        pairs |= matches
    missing = [name for name in state.values if name not in manifest.values and name not in manifest.rank_values]
    if missing:
        raise CheckpointError(
            f"{path}: contains no value {missing[0]!r}; restore what was saved, or pass another logdir"
        )
    return pairs


def _match_by_name(current: Mapping[str, StateTensor], saved: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Match equal names, else names that are unique and equal without numbers; return {} if neither works."""
    if set(current) == set(saved):
        return {name: name for name in current}
    by_bare_name, saved_by_bare_name = ({without_numbers(n): n for n in names} for names in (current, saved))
    are_unique = len(by_bare_name) == len(current) and len(saved_by_bare_name) == len(saved)
    if set(by_bare_name) != set(saved_by_bare_name) or not are_unique:
        return {}
    return {name: saved_by_bare_name[bare] for bare, name in by_bare_name.items()}


def _match_by_position(
    current: Mapping[str, StateTensor], saved: Mapping[str, TensorEntry], path: RunPath
) -> dict[str, str]:
    for name, saved_name in zip(current, saved, strict=False):
        if without_numbers(name) != without_numbers(saved_name):
            raise CheckpointError(
                f"{path}: is from another model: it has {saved_name!r}, {saved[saved_name]}, and this one has "
                f"{name!r}; build the model that was saved, or pass another logdir"
            )
    if len(current) != len(saved):
        longer = current if len(current) > len(saved) else saved
        extra = list(longer)[min(len(current), len(saved))]
        owner = "this model" if longer is current else "the checkpoint"
        raise CheckpointError(
            f"{path}: is from another model: only {owner} has {extra!r} ({len(saved)} tensors saved, {len(current)} "
            "expected); build the model that was saved, or pass another logdir"
        )
    return dict(zip(current, saved, strict=True))


def _check_match(tensor: StateTensor, saved: TensorEntry, name: str, path: RunPath) -> None:
    is_same_array = tensor.shape == saved.shape and tensor.dtype == np.dtype(saved.dtype)
    # A table may be sharded at one number of ranks and replicated at another; both are one array.
    if not is_same_array or (tensor.kind != saved.kind and "per_rank" in (tensor.kind, saved.kind)):
        raise CheckpointError(
            f"{path}: {name!r} was saved as {saved}, but is {tensor.dtype.name}{list(tensor.shape)} ({tensor.kind}) "
            "here; build the model that was saved, or pass another logdir"
        )


_Item = TypeVar("_Item")


def _by_key(items: Mapping[str, _Item]) -> dict[str, dict[str, _Item]]:
    """Return the items of each key of the state, in order."""
    found: dict[str, dict[str, _Item]] = {}
    for name, item in items.items():
        found.setdefault(key_of(name), {})[name] = item
    return found
