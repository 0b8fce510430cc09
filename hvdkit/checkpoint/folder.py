"""A folder of checkpoints: naming, the latest good checkpoint, retention, and cleanup after a killed run.

Whatever is named like a step is a checkpoint. It is *good* if its manifest is intact, all its files have the recorded
lengths, and damage has not been recorded for it. Reading all of its bytes may still reveal damage, which is then
recorded in a file next to it. Anything else is damaged: it is never counted, removed or replaced.

What is said here of local folders, ``store_folder`` does in object stores.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.checkpoint import store_folder, stores
from hvdkit.checkpoint.bounds import NOTE_BYTES
from hvdkit.checkpoint.files import (
    PROBE,
    RunPath,
    checkpoint_errors,
    exists,
    is_folder,
    names_in,
    open_regular,
    read_errors,
    remove_file,
    remove_folder,
    run_path,
    write_text,
)
from hvdkit.checkpoint.manifest import Manifest, is_checkpoint, step_of
from hvdkit.errors import CheckpointError, describe, printable
from hvdkit.machine.replacing import sync

if TYPE_CHECKING:
    from upath import UPath

_WRITING = ".writing-"
_REPLACED = ".replaced-"
_DAMAGED = ".damaged-"


def temporary_path(target: Path, token: str) -> Path:
    """Return the path where ``target`` is written until it is complete. It is never listed as a checkpoint."""
    return target.with_name(f"{_WRITING}{target.name}-{token}")


def commit(source: Path, target: Path) -> None:
    """Rename a complete checkpoint from its temporary to its final name, replacing a good one.

    If the process is killed between the two renames, the old checkpoint has a temporary name; :func:`tidy` renames it
    back. Whatever else has the name is not removed but renamed to ``step-....damaged``.
    """
    with checkpoint_errors(target, "written"):
        sync(source)
        replaced = target.with_name(f"{_REPLACED}{target.name}")
        if not os.path.lexists(target):
            remove_note(target)  # the user may have removed the checkpoint
        elif is_good(target):
            remove_folder(replaced)
            target.rename(replaced)
        else:
            _set_aside(target)
        source.rename(target)
        sync(target.parent)
    remove_folder(replaced)


def check_replaceable(target: RunPath) -> None:
    """Raise unless a save may replace ``target``: nothing, an empty folder, or a checkpoint, intact or damaged."""
    with checkpoint_errors(target, "read"):
        may_replace = step_of(target) is not None or is_checkpoint(target)
        if exists(target) and not may_replace and not _is_empty_folder(target):
            got = f"{target}, which exists and is not a checkpoint"
            remedy = "pass another path, such as step-000001200 in that folder"
            raise CheckpointError(describe("path", got, "a new folder, or a checkpoint to replace", remedy))


def _is_empty_folder(path: RunPath) -> bool:
    if isinstance(path, Path):
        return path.is_dir() and not names_in(path)
    return not stores.has_objects(path)


def list_checkpoints(folder: RunPath) -> list[RunPath]:
    """Return what is named like a step in a folder, oldest first: checkpoints, intact or damaged.

    In a store, only what has a manifest: the rest is a save that is in progress, or was killed.
    """
    if isinstance(folder, Path) and not os.path.lexists(folder):
        return []
    with checkpoint_errors(folder, "read"):
        names = names_in(folder)
    if not isinstance(folder, Path):
        names = list({*names, *store_folder.recent(folder)})
    named = [path for path in (folder / name for name in names) if step_of(path) is not None]
    return _in_order(path for path in named if is_checkpoint(path))


def _in_order(paths: Iterable[RunPath]) -> list[RunPath]:
    return sorted(paths, key=lambda path: (step_of(path) or 0, path.name))


def checkpoints_in(folder: RunPath) -> list[RunPath]:
    """Return :func:`list_checkpoints` of a folder of checkpoints, or of the one in a ``logdir``."""
    inner = folder / "checkpoints"
    if isinstance(inner, Path):
        return list_checkpoints(inner if inner.is_dir() else folder)
    return list_checkpoints(inner) or list_checkpoints(folder)


def is_good(path: RunPath) -> bool:
    """Return True unless :func:`find_damage` finds damage; a checkpoint with a damage note is not read."""
    return read_damage(path) is None and isinstance(_load(path), Manifest)


def find_damage(path: RunPath) -> str | None:
    """Return the damage of ``path`` that the manifest, the file lengths or a damage note show; None if it is good."""
    found = _load(path)
    return read_damage(path) if isinstance(found, Manifest) else found


def _load(path: RunPath) -> Manifest | str:
    """Return a checkpoint's manifest, or what is wrong with it. Raises UnansweredError if its store does not answer."""
    try:
        return Manifest.load(path)
    except stores.UnansweredError:
        raise
    except CheckpointError as error:
        return str(error)


def latest(folder: str | RunPath) -> RunPath | None:
    """Return the newest good checkpoint of ``folder``, or None.

    Does not read tensors, so it does not detect a flipped byte. ``restore`` and ``verify`` detect and record it; from
    then on the checkpoint is not returned.

    Args:
        folder: a folder of ``step-...`` folders, or a ``logdir`` whose ``checkpoints`` folder contains them; or the
            URL of one in a store.

    Returns:
        The path of the checkpoint with the highest step; of a store, as a ``upath.UPath``.

    Examples:
        >>> import tempfile
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> logdir = hk.broadcast_object(tempfile.mkdtemp())  # one folder for all ranks
        >>> for step in 100, 200:
        ...     path = hk.checkpoint.save(f"{logdir}/step-{step:09}", {"step": step})
        >>> path = hk.checkpoint.latest(logdir)
        >>> path.name
        'step-000000200'
        >>> hk.checkpoint.restore(path, {"step": 0})
        {'step': 200}
        >>> hk.checkpoint.latest("runs/no-such-run") is None
        True
    """
    candidates = reversed(checkpoints_in(run_path(folder, "folder")))
    return next((path for path in candidates if is_good(path)), None)


def record_damage(path: RunPath, damage: str) -> None:
    """Record damage in a file next to a checkpoint: the checkpoint is kept, but neither used nor counted."""
    with contextlib.suppress(CheckpointError, OSError):  # a read-only disk must not stop a restore
        if is_checkpoint(path) or is_folder(path):
            write_text(_note_path(path), printable(damage) + "\n")


def clear_damage(path: RunPath) -> None:
    """Remove the damage note of a checkpoint whose bytes were all verified, e.g. after a repair."""
    with contextlib.suppress(CheckpointError, OSError):
        remove_file(_note_path(path))


def read_damage(path: RunPath) -> str | None:
    """Return the damage that :func:`record_damage` recorded for ``path``, or None; for a terminal, in one line."""
    note = _note_path(path)
    if not isinstance(note, Path):
        start = stores.read_start(note, NOTE_BYTES)
        if start is None or not (is_checkpoint(path) or exists(path)):
            return None
    elif not exists(note) or not exists(path):
        return None
    else:
        try:
            with os.fdopen(open_regular(note), "rb") as file, read_errors(note):
                start = file.read(NOTE_BYTES)
        except CheckpointError as error:
            return printable(error)
    text = start.decode(errors="replace").strip()
    return printable(text) or f"{note} is empty"


def _note_path(path: RunPath) -> RunPath:
    return path.with_name(f"{_DAMAGED}{path.name}")


def remove_note(path: RunPath) -> None:
    """Remove the damage note of a checkpoint whose name another one gets."""
    note = _note_path(path)
    with contextlib.suppress(FileNotFoundError):
        if isinstance(note, Path) and note.is_dir() and not note.is_symlink():
            remove_folder(note)
        else:
            remove_file(note)


def _set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that its name can be used, and remove its note."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in itertools.count())
    path.rename(next(name for name in names if not os.path.lexists(name)))
    remove_note(path)


def prune(current: RunPath, max_to_keep: int | None, keep_every: int | None, known: set[str] | None = None) -> None:
    """Remove good checkpoints older than ``current`` until ``max_to_keep`` are left, including ``current``.

    ``known`` has the names of the good checkpoints that a run has saved or examined, and is brought up to date: in a
    store, these are not examined at each save.

    Neither counted nor removed: damaged checkpoints, which are left for the user to inspect; checkpoints older than
    the newest ``max_to_keep`` whose step is a multiple of ``keep_every``; and checkpoints of a later step, which
    another run wrote or this run could not restore.
    """
    if max_to_keep is None:
        return
    step = step_of(current) or 0
    known = set() if known is None else known
    good: Iterable[RunPath]
    if isinstance(current, Path):
        good = (path for path in list_checkpoints(current.parent) if (step_of(path) or 0) < step and is_good(path))
    else:
        good = _good_in_store(current, known)
    older = [path for path in good if (step_of(path) or 0) < step]
    for path in older[: max(0, len(older) - (max_to_keep - 1))]:
        if keep_every is None or (step_of(path) or 0) % keep_every:
            if isinstance(path, Path):
                # Rename first: a partially removed folder must not look like a checkpoint.
                removed = path.with_name(f"{_WRITING}{path.name}-old")
                path.rename(removed)
                remove_folder(removed)
            else:
                known.discard(path.name)
                manifest = _load(path)
                if read_damage(path) is None and isinstance(manifest, Manifest):  # it is still good
                    store_folder.remove(path, manifest.files)


def _good_in_store(current: UPath, known: set[str]) -> list[RunPath]:
    """Return the good checkpoints next to ``current``, which is one; examine those that a listing does not confirm."""
    folder = current.parent
    listed = stores.sizes(folder)
    names = {*listed, *(known or store_folder.recent(folder)), current.name}
    known.add(current.name)
    for path in (folder / name for name in names):
        is_noted = _note_path(path).name in listed
        is_confirmed = path.name in known and (path == current or path.name in listed) and not is_noted
        if step_of(path) is None or is_confirmed:
            continue
        if is_checkpoint(path) and is_good(path):
            known.add(path.name)
        else:
            known.discard(path.name)
    return _in_order(folder / name for name in known)


def tidy(folder: RunPath, only: str | None = None) -> None:
    """Remove temporary folders left by a killed run, and rename a checkpoint back that was being replaced.

    The caller ensures that another run is not writing to the folder, or to the checkpoint with the name ``only``.
    """
    if not isinstance(folder, Path):
        store_folder.tidy(folder, only)
        return
    if not os.path.lexists(folder):
        return
    name = "[^/]+" if only is None else re.escape(only)
    with checkpoint_errors(folder, "written"):
        for path in list(folder.iterdir()):
            if match := re.fullmatch(f"{re.escape(_REPLACED)}({name})", path.name):
                target = path.with_name(match[1])
                if os.path.lexists(target) and is_good(target):
                    remove_folder(path)
                elif not os.path.lexists(target) or is_good(path):
                    if os.path.lexists(target):
                        _set_aside(target)
                    path.rename(target)
            elif re.fullmatch(f"{re.escape(_WRITING)}{name}-[^-]+", path.name):  # a token has no hyphen
                remove_folder(path)
            elif only is None and path.name.startswith(PROBE):
                remove_file(path)
