"""Refuse callbacks of plain ``fit`` that write to one path on several ranks, which damages the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import keras

from hvdkit.cluster.live_objects import live_instances
from hvdkit.errors import CollectiveMismatchError, describe

# Callbacks that write files, and their path attributes.
_PATHS: Mapping[type, str] = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.BackupAndRestore: "backup_dir",
    # Since Keras 3.14.
    **{kind: "directory" for kind in [getattr(keras.callbacks, "OrbaxCheckpoint", None)] if kind is not None},
}


def running_callbacks(is_trained: Callable[[keras.Model], bool]) -> Iterator[keras.callbacks.Callback]:
    """Yield the callbacks in a running ``fit``.

    Neither an optimizer nor a callback can see the other callbacks of a ``fit``, so they are searched among the
    existing ones. Those of a running ``fit`` share one dict of parameters with the History of their model.
    """
    for callback in live_instances(keras.callbacks.Callback):
        model = getattr(callback, "model", None)
        if model is None or not is_trained(model):
            continue
        history = getattr(model, "history", None)
        if history is not None and history.params is callback.params:
            yield callback


def written_paths(is_trained: Callable[[keras.Model], bool]) -> dict[str, str]:
    """Return the class names of callbacks in a running ``fit`` that write files, by absolute path."""
    paths: dict[str, str] = {}
    for callback in running_callbacks(is_trained):
        attribute = next((name for kind, name in _PATHS.items() if isinstance(callback, kind)), None)
        if attribute is not None:
            path = str(getattr(callback, attribute))
            paths[path if "://" in path else str(Path(path).resolve())] = type(callback).__name__
    return paths


def check_paths(paths_of_ranks: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> None:
    """Raise CollectiveMismatchError if callbacks of several ranks write to the same path: see :func:`written_paths`."""
    for path, name in (pair for paths in paths_of_ranks for pair in paths.items()):
        writers = [rank for rank, paths in zip(ranks, paths_of_ranks, strict=True) if path in paths]
        if len(writers) > 1:
            got = f"{name} that writes {path!r} on ranks {writers[0]} and {writers[1]}"
            got += f" and {len(writers) - 2} more" * (len(writers) > 2)
            remedy = "use hk.fit, which has the chief write, or pass hk.callbacks.on_chief(callback)"
            raise CollectiveMismatchError(describe("callbacks", got, "one rank that writes to a path", remedy))
