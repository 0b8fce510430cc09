"""Export a checkpoint's model as a SavedModel for plain TensorFlow."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import keras

from hvdkit import cluster
from hvdkit.checkpoint.export import check_target
from hvdkit.checkpoint.files import RunPath, checkpoint_errors, local_path, remove_folder, run_path
from hvdkit.checkpoint.inspection import newest_at
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.matching import match
from hvdkit.checkpoint.reading import Reader
from hvdkit.checkpoint.restoring import restore_values
from hvdkit.checkpoint.state import flatten
from hvdkit.errors import describe
from hvdkit.machine.replacing import replaced
from hvdkit.sharding.shards import shard_of


def export_saved_model(
    path: str | RunPath,
    model: keras.Model | Callable[[], keras.Model],
    directory: str | Path,
    *,
    key: str = "model",
    overwrite: bool = False,
) -> Path:
    """Restore a checkpoint's model and write it as a SavedModel that plain TensorFlow can serve.

    Runs in one process, regardless of the number of ranks that saved, without ``hk.init()``, Horovod or MPI. The
    per-rank BatchNormalization moving statistics are averaged over ranks.

    Args:
        path: a checkpoint; or a folder of checkpoints or a ``logdir``, in which case the newest intact one is used.
        model: a Keras model built like the saved one, whose variables are set; or a function that builds it. Pass a
            function for a model with sharded layers if ``hk.init()`` was not called: it builds unsharded tables here.
        directory: where to write; created atomically.
        key: the model's name in the saved state; ``hk.Supervisor`` saves it as "model".
        overwrite: replace ``directory`` if it exists.

    Returns:
        ``directory``.

    Raises:
        ValueError: ``directory`` is not empty, or the model is not built or is sharded across ranks.
        TypeError: ``model`` is neither a model nor a function that returns one.
        CheckpointError: no checkpoint is found, it is from another model, or ``directory`` cannot be written.
        CorruptCheckpointError: the bytes differ from those saved; the message names file, tensor and rows.

    Examples:
        >>> import tempfile
        >>> import keras
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> path = hk.checkpoint.save(hk.broadcast_object(tempfile.mkdtemp()), {"model": model})
        >>> directory = hk.checkpoint.export_saved_model(path, model, tempfile.mkdtemp())
        >>> served = tf.saved_model.load(str(directory))
        >>> served.serve(tf.ones([3, 4])).shape
        TensorShape([3, 2])
    """
    path = newest_at(run_path(path, "path"))
    directory = local_path(directory, "directory")
    check_target(directory, overwrite)
    with cluster.alone():
        whole = model if isinstance(model, keras.layers.Layer) or not callable(model) else model()
        _check_model(whole)
        _restore(path, {key: whole})
        _export(whole, directory, overwrite)
    return directory


def _check_model(model: object) -> None:
    if not isinstance(model, keras.Model):
        remedy = "pass a model, or a function that returns one"
        raise TypeError(describe("model", type(model).__name__, "a Keras model", remedy))
    if not model.built:
        remedy = "give it a keras.Input, or call it once"
        raise ValueError(describe("model", f"{model.name!r}, which is not built", "a built model", remedy))
    if cluster.size() > 1 and any(shard_of(v) is not None for v in model.variables):
        remedy = "export in one process, from a function that builds it"
        raise ValueError(describe("model", f"{model.name!r}, which is sharded across ranks", "a whole model", remedy))


def _export(model: keras.Model, directory: Path, overwrite: bool) -> None:
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}")
    with checkpoint_errors(directory, "written"), replaced(directory, temporary):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):  # it would print the temporary name
            model.export(temporary)
        if directory.is_dir() and overwrite:
            remove_folder(directory)


def _restore(path: RunPath, into: Mapping[str, object]) -> None:
    """Restore a state in this process only, as with a world size of 1."""
    manifest = Manifest.load(path)
    state = flatten(into)
    names = match(manifest, state, path)
    with Reader(path, manifest) as reader:
        for tensor in state.tensors.values():
            part = reader.part(tensor, names[tensor.name], 0, 1)
            if part is not None:
                tensor.assign(part)
        needs_rank_values = any(value.per_rank for value in state.values.values())
        restore_values(path, manifest, state, reader.rank_values(0) if needs_rank_values else {}, 0)
