"""Load Keras models from files with a distributed optimizer."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import h5py
import keras
import numpy as np

from hvdkit import cluster
from hvdkit.cluster.agreement import run_on_all_ranks
from hvdkit.errors import describe
from hvdkit.optimizer.distributed import distribute
from hvdkit.optimizer.inner_optimizers import trained_by
from hvdkit.optimizer.mixin import DistributedMixin
from hvdkit.sharding.variables import broadcast_variables


def load_model(
    path: str | Path,
    custom_objects: Mapping[str, object] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    **options: Any,
) -> keras.Model:
    """Return ``keras.models.load_model(path)`` with a distributed optimizer. Every rank must call it.

    A model saved with a plain or a distributed optimizer is restored compiled, with the optimizer's state: iterations,
    learning rate, slots and accumulated gradients. Each rank reads its shards of tables and their slots. All other
    variables get the chief's values on every rank. A model saved without compiling is returned uncompiled.

    ``jit_compile=True`` is kept, for ``hk.fit`` or ``fit`` with a callback of hvdkit. On several ranks, Keras's default
    ``"auto"`` is False.

    Keras saves the optimizer's own options, including ``gradient_accumulation_steps``, but not those of
    ``hk.DistributedOptimizer``: users pass these again.

    Args:
        path: a ``.keras`` file, or another file that Keras can load, readable by every rank.
        custom_objects: as for ``keras.models.load_model``.
        compile: as for ``keras.models.load_model``.
        safe_mode: as for ``keras.models.load_model``.
        **options: options of ``hk.DistributedOptimizer``: ``clip_global_norm``, ``compression``, ...

    Returns:
        The model, the same on every rank.

    Raises:
        ValueError: the optimizer state in the file does not match the model and these options; the file is an ``.h5``
            file, from which Keras does not restore optimizer state; or Keras itself raises it.
        CollectiveMismatchError: another rank could not load its file, or its model has different shapes.

    Examples:
        >>> import tempfile
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> x, y = np.ones((32, 4)), np.ones((32, 1))
        >>> history = hk.fit(model, x, y, epochs=2, verbose=0)
        >>> file = hk.broadcast_object(tempfile.mkdtemp()) + "/model.keras"  # one file for all ranks
        >>> model.save(file)  # after hk.fit, all ranks may do so
        >>> hk.barrier()
        >>> model = hk.load_model(file)
        >>> int(model.optimizer.iterations)
        2
        >>> history = hk.fit(model, x, y, epochs=4, initial_epoch=2, verbose=0)
    """
    model = run_on_all_ranks(
        cluster.exchange(),
        "load_model()",
        lambda: _load(Path(path), custom_objects, compile, safe_mode, options),
    )
    optimizer = getattr(model, "optimizer", None)
    broadcast_variables([*model.variables, *(() if optimizer is None else optimizer.variables)])
    return model


def _load(
    path: Path, custom_objects: Mapping[str, object] | None, compiles: bool, safe_mode: bool, options: dict[str, Any]
) -> keras.Model:
    in_two_steps = compiles and path.suffix == ".keras" and zipfile.is_zipfile(path)
    model = keras.models.load_model(
        path, custom_objects=custom_objects, compile=compiles and not in_two_steps, safe_mode=safe_mode
    )
    if in_two_steps:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json")).get("compile_config")
        if not config:
            return model
        with keras.saving.custom_object_scope(custom_objects or {}):
            model.compile_from_config(config)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    if optimizer.built and len(trained_by(optimizer)) != len(model.trainable_variables):
        got = f"{path}, whose optimizer state Keras {keras.__version__} does not restore"
        remedy = "save a .keras file, or pass compile=False and compile again"
        raise ValueError(describe("path", got, "a .keras file", remedy))
    asks_for_xla = (model.get_compile_config() or {}).get("jit_compile") is True
    if not isinstance(optimizer, DistributedMixin):
        model.optimizer = distribute(optimizer, **options)
    if cluster.size() > 1 and not asks_for_xla:
        model.jit_compile = False  # Keras's default is True on GPUs, and plain fit compiles whole steps
    if in_two_steps and model.built:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        _load_state(model, path)
    return model


def _was_trained(path: Path) -> bool:
    """Return whether the optimizer in a ``.keras`` file, or one that it contains, has made a step."""
    has_made_steps: list[bool] = []

    def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if name.endswith("vars/0"):  # the number of steps
            has_made_steps.append(bool(np.any(item[()])))

    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as weights, h5py.File(weights) as file:
        if "optimizer" in file:
            file["optimizer"].visititems(visit)
    return any(has_made_steps)


def _load_state(model: keras.Model, path: Path) -> None:
    """Load this rank's weights and the state of the current optimizer."""
    with warnings.catch_warnings():
        # Before the first step, Keras saves no slots: there is no state to miss.
        action: Literal["error", "ignore"] = "error" if _was_trained(path) else "ignore"
        warnings.filterwarnings(action, message="Skipping variable loading")
        try:
            model.load_weights(path)
        except UserWarning as error:
            expected = "a state that matches this model and these options"
            remedy = "pass the options that the optimizer was saved with, or compile=False"
            got = f"{path}, whose optimizer state does not match ({error})"
            raise ValueError(describe("path", got, expected, remedy)) from error
