"""A folder of checkpoints in an object store, where nothing can be renamed.

A checkpoint exists when its manifest does, which is written last and removed first. A save to a name that has a
checkpoint gives its files other names, so that the old manifest stays true until the new one replaces it.

Listings of some stores lag behind: they lack an object that was written, and show one that was removed. Whether a
checkpoint exists is therefore asked of its manifest, and the newest ones are also named in an object.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hvdkit.checkpoint import stores
from hvdkit.checkpoint.files import PROBE
from hvdkit.checkpoint.manifest import NAME, Manifest, step_of
from hvdkit.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    from upath import UPath

REPORT = re.compile(r"rank-([0-9]+)-[0-9a-f]+\.json")
RECENT = ".recent"
"""Name of the object with the names of the checkpoints that were saved last."""
_MOST_RECENT = 64
_RECENT_BYTES = 2**14
_SUFFIXED = re.compile(r"(?:replicated|shard-[0-9]+-of-[0-9]+)-[0-9a-f]+\.safetensors")


def report_name(rank: int, token: str) -> str:
    """Return the name of the report that a rank writes for the chief when its files are in the store."""
    return f"rank-{rank:05d}-{token}.json"


def recent(folder: UPath) -> list[str]:
    """Return the names of the checkpoints that were saved last, the newest last; some may have been removed."""
    try:
        names = stores.read_bounded(folder / RECENT, _RECENT_BYTES).decode(errors="replace").split("\n")
    except CorruptCheckpointError:
        return []
    return [name for name in names if step_of(folder / name) is not None]


def note_recent(target: UPath) -> None:
    """Add a checkpoint to :func:`recent`, before its manifest exists: a listing may show it much later."""
    if step_of(target) is not None:
        names = [name for name in recent(target.parent) if name != target.name]
        stores.write_bytes(target.with_name(RECENT), "\n".join([*names, target.name][-_MOST_RECENT:]).encode())


def files_of(path: UPath) -> list[str]:
    """Return the names of the files in a checkpoint's manifest; none if that is missing or damaged."""
    try:
        return list(Manifest.parse(path, check_parts=False).files)
    except stores.UnansweredError:
        raise
    except CheckpointError:
        return []


def remove(path: UPath, files: Iterable[str]) -> None:
    """Remove a checkpoint, its manifest first, then its ``files`` and what else is in its folder."""
    stores.remove([path / NAME])
    stores.remove(path / name for name in files)
    stores.remove_folder(path)


def sweep(target: UPath, manifest: Manifest, others: Iterable[str] = ()) -> None:
    """Remove what is in a checkpoint's folder and not of it: reports, and the files of a save that was replaced.

    A listing may not show the ``others`` of these files yet.
    """
    listed = [name for name, size in stores.sizes(target).items() if size is not None]
    names = dict.fromkeys([*others, *listed])
    stores.remove(target / name for name in names if name not in manifest.files and name != NAME)


def set_aside(target: UPath, suffix: str) -> None:
    """Copy a damaged checkpoint to ``step-....damaged``, its manifest last; files with ``suffix`` will replace it."""
    paths = (target.with_name(f"{target.name}.damaged{number or ''}") for number in itertools.count())
    copied = next(path for path in paths if not stores.exists(path / NAME) and not stores.exists(path))
    listed = [name for name, size in stores.sizes(target).items() if size is not None]
    names = {*listed, *files_of(target), NAME}  # a listing may not show all of them yet
    files = [name for name in names if not (REPORT.fullmatch(name) or name.endswith(f"{suffix}.safetensors"))]
    for name in sorted(files, key=lambda name: (name == NAME, name)):
        stores.copy(target / name, copied / name)


def tidy(folder: UPath, only: str | None) -> None:
    """Remove what killed saves left: folders named like a step without a manifest, and files of no manifest.

    The caller ensures that no other run is writing to the folder, or to the checkpoint with the name ``only``.
    """
    for name, size in stores.sizes(folder).items():
        path = folder / name
        if only is None and name.startswith(PROBE):
            stores.remove([path])
        if size is not None or step_of(path) is None or only not in (None, name):
            continue
        names = stores.sizes(path)
        if NAME not in names and not stores.exists(path / NAME):
            stores.remove_folder(path)
        elif any(REPORT.fullmatch(name) or _SUFFIXED.fullmatch(name) for name in names):
            try:
                manifest = Manifest.parse(path, check_parts=False)
            except CheckpointError:
                continue  # damaged: nothing of it is removed
            sweep(path, manifest)
