"""A folder of checkpoints: names, the newest good one, retention, and what a killed run left behind.

A checkpoint is *good* if its manifest is what was written, all its files have their lengths, and no damage to it is
noted. Reading all of its bytes may still find some, which is then noted in a file next to it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
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
    with damage is not removed but renamed to ``step-....damaged``.

    Raises:
        CheckpointError: the file system refuses.
    """
    with naming_file(target, "written"):
        sync_folder(written)
        before = target.with_name(f"{_REPLACED}{target.name}")
        if noted_damage(target) is not None:
            target.rename(_free_name(target))
        elif target.exists():
            target.rename(before)
        _note(target).unlink(missing_ok=True)  # even without a checkpoint: the user may have removed the damaged one
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


def is_good(path: Path) -> bool:
    """Return True if no damage to ``path`` is noted or shows in its manifest and the lengths of its files."""
    if noted_damage(path) is not None:
        return False
    try:
        Manifest.load(path)
    except CheckpointError:
        return False
    return True


def latest(folder: Path) -> Path | None:
    """Return the newest good checkpoint of ``folder``, or None.

    Reads no tensor, and so does not see a flipped byte. ``restore`` and ``verify`` see it and note it; from then on the
    checkpoint is not returned.

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
    return next((path for path in reversed(candidates) if is_good(path)), None)


def note_damage(path: Path, damage: str) -> None:
    """Note next to a checkpoint what is damaged, so that it is kept and neither used nor counted."""
    if path.is_dir():
        with contextlib.suppress(CheckpointError):  # a read-only disk must not stop a restore
            write_text(_note(path), damage + "\n")


def forget_damage(path: Path) -> None:
    """Remove the note of damage to a checkpoint whose bytes were all found to be good, e.g. after a repair."""
    with contextlib.suppress(OSError):
        _note(path).unlink(missing_ok=True)


def noted_damage(path: Path) -> str | None:
    """Return what :func:`note_damage` wrote about ``path``, or None."""
    try:
        note = _note(path).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        note = f"{_note(path)} cannot be read ({error.strerror})"
    return note if path.exists() else None


def _note(path: Path) -> Path:
    return path.with_name(f"{_DAMAGED}{path.name}")


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def prune(committed: Path, max_to_keep: int | None, keep_every: int | None) -> None:
    """Remove good checkpoints that are older than ``committed`` until ``max_to_keep`` are left, with ``committed``.

    Neither counted nor removed: damaged ones, which are for the user to look at; those whose step is a multiple of
    ``keep_every``, beyond the newest ``max_to_keep``; and those of a later step, which another run has written or
    which this run could not restore.
    """
    if max_to_keep is None:
        return
    step = step_of(committed) or 0
    older = [path for path in listed(committed.parent) if (step_of(path) or 0) < step and is_good(path)]
    for path in older[: max(0, len(older) - (max_to_keep - 1))]:
        if keep_every is None or (step_of(path) or 0) % keep_every:
            # First to a name that is not listed: a removal that is cut short must not look like a checkpoint.
            removed = path.with_name(f"{_WRITING}{path.name}-old")
            path.rename(removed)
            remove_folder(removed)


def tidy(folder: Path) -> None:
    """Remove what a killed run was writing or removing, and give a checkpoint back its name that was being replaced.

    No other run may be writing to the folder.
    """
    _tidy(folder, "[^/]+")


def tidy_one(path: Path) -> None:
    """Do as :func:`tidy` for one checkpoint's name alone."""
    _tidy(path.parent, re.escape(path.name))


def _tidy(folder: Path, name: str) -> None:
    """Tidy what belongs to checkpoints whose names match the pattern ``name``."""
    if not folder.is_dir():
        return
    with naming_file(folder, "written"):
        for path in list(folder.iterdir()):
            if match := re.fullmatch(f"{re.escape(_REPLACED)}({name})", path.name):
                target = path.with_name(match[1])
                if target.exists():
                    remove_folder(path)
                else:
                    path.rename(target)
            elif re.fullmatch(f"{re.escape(_WRITING)}{name}-[^-]+", path.name):  # a token has no hyphen
                remove_folder(path)
