"""A folder of checkpoints: names, the newest whole one, which may go, and what a killed run left behind."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from hvdkit.checkpoint.files import naming_file, remove_folder, sync_folder, write_text
from hvdkit.checkpoint.manifest import NAME, Manifest
from hvdkit.errors import CheckpointError

_STEP = re.compile(r"step-(\d{9,})")
_WRITING, _REPLACED, _DAMAGED = ".writing-", ".replaced-", ".damaged-"


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder.

    Example:
        >>> step_name(1200)
        'step-000001200'
    """
    return f"step-{step:09d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name, or None for another name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def writing_name(target: Path, token: str) -> Path:
    """Return where ``target`` is written before it is whole; a name that is never listed."""
    return target.with_name(f"{_WRITING}{target.name}-{token}")


def commit(written: Path, target: Path) -> None:
    """Give a whole checkpoint its name; one of that name before is replaced, and there is always one of them.

    A kill between the two renames leaves the old one under another name: :func:`tidy` gives it its name back. One
    that is known to be damaged is not removed but renamed to ``step-....damaged``.

    Raises:
        CheckpointError: the file system refuses.
    """
    with naming_file(target, "written"):
        sync_folder(written)
        before = target.with_name(f"{_REPLACED}{target.name}")
        if is_marked(target):
            target.rename(_free_name(target))
            _mark(target).unlink()
        elif target.exists():
            target.rename(before)
        written.rename(target)
        sync_folder(target.parent)
    remove_folder(before)


def listed(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder by step, oldest first: those with a manifest, whole or damaged."""
    if not folder.is_dir():
        return []
    with naming_file(folder, "read"):
        found = [path for path in folder.iterdir() if step_of(path) is not None and (path / NAME).is_file()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def is_whole(path: Path) -> bool:
    """Return True where the manifest is what was written and all files have their lengths. Reads no tensor."""
    try:
        Manifest.load(path)
    except CheckpointError:
        return False
    return True


def latest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of ``folder``, or None.

    Args:
        folder: a folder of ``step-...`` folders, or a ``logdir`` whose ``checkpoints`` folder holds them.

    Example::

        path = hk.checkpoint.latest("runs/mnist")
        if path is not None:
            hk.checkpoint.restore(path, {"model": model})
    """
    folder = Path(folder)
    inner = folder / "checkpoints"
    candidates = listed(inner if inner.is_dir() else folder)
    return next((path for path in reversed(candidates) if is_whole(path)), None)


def mark_damaged(path: Path, reason: str) -> None:
    """Note beside a checkpoint that it is damaged, so that it is kept for the person to look at."""
    with contextlib.suppress(CheckpointError):  # a note that cannot be written must not stop a restore
        write_text(_mark(path), reason + "\n")


def is_marked(path: Path) -> bool:
    """Return True where :func:`mark_damaged` has noted ``path``."""
    return _mark(path).exists() and path.exists()


def noted_damage(path: Path) -> str | None:
    """Return what :func:`mark_damaged` has noted of ``path``, or None."""
    if not is_marked(path):
        return None
    with naming_file(_mark(path), "read"):
        return _mark(path).read_text(errors="replace").strip()


def _mark(path: Path) -> Path:
    return path.with_name(f"{_DAMAGED}{path.name}")


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def prune(folder: Path, max_to_keep: int | None, keep_every: int | None) -> None:
    """Remove the oldest whole checkpoints but ``max_to_keep``, and those whose step is a multiple of ``keep_every``.

    Damaged ones are neither counted nor removed: they are for the person to look at.
    """
    if max_to_keep is None:
        return
    whole = [path for path in listed(folder) if is_whole(path)]
    for path in whole[:-max_to_keep]:
        kept = keep_every is not None and (step_of(path) or 0) % keep_every == 0
        if not kept and not is_marked(path):
            # Under a name that is not listed first: a removal that is cut short must not look like a checkpoint.
            going = path.with_name(f"{_WRITING}{path.name}-old")
            path.rename(going)
            remove_folder(going)


def tidy(folder: Path) -> None:
    """Remove what a killed run was writing or removing, and give a checkpoint back its name that was being replaced.

    Nobody else may be writing there.
    """
    _tidy(folder, "")


def tidy_one(path: Path) -> None:
    """Do as :func:`tidy` for one checkpoint's name alone."""
    _tidy(path.parent, path.name)


def _tidy(folder: Path, name: str) -> None:
    if not folder.is_dir():
        return
    with naming_file(folder, "written"):
        for path in list(_hidden(folder, f"{_REPLACED}{name}")):
            target = path.with_name(path.name.removeprefix(_REPLACED))
            if target.exists():
                remove_folder(path)
            else:
                path.rename(target)
        for path in list(_hidden(folder, f"{_WRITING}{name}")):
            remove_folder(path)


def _hidden(folder: Path, prefix: str) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.name.startswith(prefix))
