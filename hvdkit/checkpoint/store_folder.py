"""A folder of checkpoints in an object store, where nothing can be renamed.

A checkpoint exists when its manifest does, which is written last and removed first. A save to a name that has a
checkpoint gives its files other names, so that the old manifest stays true until the new one replaces it.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from hvdkit.checkpoint import stores
from hvdkit.checkpoint.files import PROBE
from hvdkit.checkpoint.manifest import NAME, Manifest, step_of
from hvdkit.errors import CheckpointError

if TYPE_CHECKING:
    from upath import UPath

REPORT = re.compile(r"rank-([0-9]+)-[0-9a-f]+\.json")
_SUFFIXED = re.compile(r"(?:replicated|shard-[0-9]+-of-[0-9]+)-[0-9a-f]+\.safetensors")


def report_name(rank: int, token: str) -> str:
    """Return the name of the report that a rank writes for the chief when its files are in the store."""
    return f"rank-{rank:05d}-{token}.json"


def remove(path: UPath) -> None:
    """Remove a checkpoint, its manifest first."""
    stores.remove([path / NAME])
    stores.remove_folder(path)


def sweep(target: UPath, manifest: Manifest) -> None:
    """Remove what is in a checkpoint's folder and not of it: reports, and the files of a save that was replaced."""
    others = [name for name, size in stores.sizes(target).items() if size is not None and name not in manifest.files]
    stores.remove(target / name for name in others if name != NAME)


def set_aside(target: UPath, suffix: str) -> None:
    """Copy a damaged checkpoint to ``step-....damaged``, its manifest last; files with ``suffix`` will replace it."""
    paths = (target.with_name(f"{target.name}.damaged{number or ''}") for number in itertools.count())
    copied = next(path for path in paths if not stores.exists(path))
    names = [name for name, size in stores.sizes(target).items() if size is not None]
    files = [name for name in names if not (REPORT.fullmatch(name) or name.endswith(f"{suffix}.safetensors"))]
    for name in sorted(files, key=lambda name: name == NAME):
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
        if NAME not in names:
            stores.remove_folder(path)
        elif any(REPORT.fullmatch(name) or _SUFFIXED.fullmatch(name) for name in names):
            try:
                manifest = Manifest.parse(path, check_parts=False)
            except CheckpointError:
                continue  # damaged: nothing of it is removed
            sweep(path, manifest)
