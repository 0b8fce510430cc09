"""Atomic ``model.save`` and ``model.save_weights``, so that all ranks may write and load the same file.

Ported programs call ``model.save("m.keras")`` on every rank and then load the file on every rank. Keras truncates the
file before writing, so a rank could load a file that another rank is still writing. Here, each rank writes a temporary
file in the same folder and renames it. Saving is not collective: the chief may also save alone.
"""

from __future__ import annotations

import functools
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import keras

from hvdkit.internals import ask_to_proceed_with_overwrite, is_remote_path
from hvdkit.machine.replacing import replaced

# Methods, and suffixes of the single files that they write.
_SUFFIXES = {"save": (".keras", ".h5", ".hdf5"), "save_weights": (".weights.h5",)}


def make_saving_atomic(model: keras.Model) -> None:
    """Make a model and its inner models save files atomically.

    Sets attributes of these instances, not of their classes. A custom ``save`` of the user's class is not changed.
    Copies and pickles of a model, which Keras creates from config and weights, have Keras's methods.
    """
    for layer in model._flatten_layers():
        for name, suffixes in _SUFFIXES.items():
            is_keras = getattr(type(layer), name, None) is getattr(keras.Model, name)
            if is_keras and name not in vars(layer):
                object.__setattr__(layer, name, _atomic(getattr(layer, name), suffixes))  # bypass Keras's tracking


def _atomic(method: Callable[..., object], suffixes: tuple[str, ...]) -> Callable[..., object]:
    @functools.wraps(method)
    def save(filepath: object, overwrite: bool = True, *args: object, **kwargs: object) -> object:
        target = _target(filepath, suffixes)
        if target is None or args or kwargs:  # with other options Keras writes several files or a folder
            return method(filepath, overwrite, *args, **kwargs)
        if not overwrite and target.exists() and not ask_to_proceed_with_overwrite(str(filepath)):
            return None
        suffix = next(suffix for suffix in suffixes if target.name.endswith(suffix))
        temporary = target.with_name(f".writing-{uuid.uuid4().hex}{suffix}")
        with replaced(target, temporary):
            method(str(temporary))
            if target.exists():
                shutil.copymode(target, temporary)
        return None

    return save


def _target(filepath: object, suffixes: tuple[str, ...]) -> Path | None:
    """Return the file to replace, or None to leave the path to Keras."""
    if not isinstance(filepath, (str, os.PathLike)) or is_remote_path(filepath):
        return None
    target = Path(os.path.realpath(filepath))  # keep a link, and replace its target
    is_file = target.is_file() or not target.exists()
    return target if is_file and target.name.endswith(suffixes) and os.access(target.parent, os.W_OK) else None
