"""Match tensors of a checkpoint to tensors of the state: by name, or by position if Keras renumbered layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hvdkit.checkpoint.entries import Entry, State
from hvdkit.checkpoint.manifest import Manifest, TensorEntry
from hvdkit.errors import CheckpointError

_NUMBER = re.compile(r"_\d+(?=/|$|_)")


def without_numbers(name: str) -> str:
    """Return a name without the numbers that Keras appends to layer names.

    Example:
        >>> without_numbers("model/sequential_3/dense_12/kernel")
        'model/sequential/dense/kernel'
    """
    return _NUMBER.sub("", name)


def match(manifest: Manifest, state: State, path: Path) -> dict[str, str]:
    """Return the saved name of every tensor in ``state``.

    Each key of the state must match completely; saved keys that the state does not have are ignored. Equal names
    match, in any order. Keras numbers layers in creation order (``dense``, ``dense_1``), so the same model may have
    different names; then tensors are matched by position, and names must be equal except for numbers.

    Raises:
        CheckpointError: the checkpoint is of another model; the message names the first tensor that differs.
    """
    pairs: dict[str, str] = {}
    for key in dict.fromkeys(_key(name) for name in state.entries):
        wanted = {name: entry for name, entry in state.entries.items() if _key(name) == key}
        saved = {name: s for name, s in manifest.variables.items() if _key(name) == key}
        if not saved:
            raise CheckpointError(
                f"{path}: holds no {key!r}; it has {sorted({_key(n) for n in manifest.variables})}. Restore what was "
                "saved, or give another logdir"
            )
        found = _by_name(wanted, saved) or _by_place(wanted, saved, path)
        for name, other in found.items():
            _check(wanted[name], saved[other], other, path)
        pairs |= found
    missing = [name for name in state.values if name not in manifest.values and name not in manifest.rank_values]
    if missing:
        raise CheckpointError(f"{path}: holds no value {missing[0]!r}; restore what was saved, or give another logdir")
    return pairs


def _by_name(wanted: Mapping[str, Entry], saved: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Match equal names, else names that are unique and equal without numbers; return {} if neither works."""
    if set(wanted) == set(saved):
        return {name: name for name in wanted}
    mine, theirs = ({without_numbers(name): name for name in names} for names in (wanted, saved))
    if set(mine) != set(theirs) or len(mine) < len(wanted) or len(theirs) < len(saved):
        return {}
    return {name: theirs[bare] for bare, name in mine.items()}


def _by_place(wanted: Mapping[str, Entry], saved: Mapping[str, TensorEntry], path: Path) -> dict[str, str]:
    for mine, theirs in zip(wanted, saved, strict=False):
        if without_numbers(mine) != without_numbers(theirs):
            raise CheckpointError(
                f"{path}: is of another model: it has {theirs!r}, {saved[theirs]}, where this one has {mine!r}; build "
                "the model that was saved, or give another logdir"
            )
    if len(wanted) != len(saved):
        longer = wanted if len(wanted) > len(saved) else saved
        extra = list(longer)[min(len(wanted), len(saved))]
        owner = "this model" if longer is wanted else "the checkpoint"
        raise CheckpointError(
            f"{path}: is of another model: only {owner} has {extra!r} ({len(saved)} tensors saved, {len(wanted)} "
            "expected); build the model that was saved, or give another logdir"
        )
    return dict(zip(wanted, saved, strict=True))


def _check(entry: Entry, saved: TensorEntry, name: str, path: Path) -> None:
    alike = (entry.shape, entry.dtype.name) == (saved.shape, saved.dtype)
    # A table may be sharded at one number of ranks and replicated at another; both are one array.
    if not alike or (entry.kind != saved.kind and "per_rank" in (entry.kind, saved.kind)):
        raise CheckpointError(
            f"{path}: {name!r} was saved as {saved}, and is {entry.dtype.name}{list(entry.shape)} ({entry.kind}) here; "
            "build the model that was saved, or give another logdir"
        )


def _key(name: str) -> str:
    return name.split("/", 1)[0]
