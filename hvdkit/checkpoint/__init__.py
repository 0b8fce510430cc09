"""Atomic, checksummed checkpoints that can be restored at any number of ranks.

``state.py`` flattens models, optimizers and values into named entries. ``saving.py`` writes them: each rank its shard
file, the chief the replicated file and the manifest, which is renamed into place when all ranks are done.
``restoring.py`` matches saved names to entries, and reads and verifies the rows that each rank needs. Start reading
with ``entries.py`` and ``manifest.py``; ``tensorfile.py`` is the file format, ``folder.py`` a folder of checkpoints.

Names are imported lazily: inspecting checkpoints needs neither TensorFlow nor Horovod.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdkit.checkpoint.export import export_npy
    from hvdkit.checkpoint.folder import latest
    from hvdkit.checkpoint.inspecting import inspect
    from hvdkit.checkpoint.restoring import restore
    from hvdkit.checkpoint.saved_model import export_saved_model
    from hvdkit.checkpoint.saving import save
    from hvdkit.checkpoint.state import ShardedState
    from hvdkit.checkpoint.verifying import verify

_HOME_OF = {
    "ShardedState": "state",
    "export_npy": "export",
    "export_saved_model": "saved_model",
    "inspect": "inspecting",
    "latest": "folder",
    "restore": "restoring",
    "save": "saving",
    "verify": "verifying",
}

__all__ = ["ShardedState", "export_npy", "export_saved_model", "inspect", "latest", "restore", "save", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hvdkit.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hvdkit.checkpoint.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
