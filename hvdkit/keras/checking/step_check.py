"""``hk.check_step``: the first training steps of all ranks, compared with those of one process, within a program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING

import keras
import numpy as np
from keras import tree

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.errors import describe
from hvdkit.keras.attribute_swap import swap_attributes
from hvdkit.keras.checking.check_result import CheckResult
from hvdkit.keras.checking.step_comparison import compare_recordings
from hvdkit.keras.checking.step_recording import StepRecorder
from hvdkit.keras.fit_session import check_all_ranks_call, check_model, forget_session
from hvdkit.keras.fitting import fit
from hvdkit.keras.loss_scopes import LossScope
from hvdkit.keras.model_optimizers import all_optimizers, distribute_optimizers, optimizers_of, original_attributes
from hvdkit.keras.own_methods import keras_method
from hvdkit.keras.strategies import outside_strategy
from hvdkit.keras.unchanged_models import is_complete, unchanged
from hvdkit.optimizer.equal_ranks import checked
from hvdkit.optimizer.inner_optimizers import with_inner
from hvdkit.sharding.shards import holding_of

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Arrays


@outside_strategy()
def check_step(
    model: keras.Model,
    x: Arrays,
    y: Arrays | None = None,
    batch_size: int | None = None,
    steps: int = 1,
    *,
    loss_scope: LossScope = "auto",
) -> CheckResult:
    """Compare training steps of all ranks with those of one process on the same global batches.

    Each rank trains ``steps`` steps as ``hk.fit`` does, on its share of each batch, and then the same steps with plain
    Keras, from the same weights on whole batches. Afterwards the layers, weights, optimizers, metrics, states and seeds
    are as before. Call it on every rank before a long training run, and print the result. `hvdkit check` compares a
    whole program instead: code that calls ``hk.rank()`` or ``hk.size()`` gets the same numbers in both runs of this
    function.

    Dropout and augmentation by Keras's layers are switched off. Differences after other random numbers do not count.

    Args:
        model: a compiled Keras model, which is built.
        x: arrays of at least ``steps * batch_size`` rows, in lists, tuples and dicts; equal on all ranks.
        y: the labels.
        batch_size: rows per global batch; default: all rows, divided by ``steps``.
        steps: number of steps.
        loss_scope: as for ``hk.fit``.

    Returns:
        The comparison, equal on all ranks: ``is_equal``, and ``values``, ``causes`` and ``notes``, which ``str`` shows.

    Raises:
        ValueError: the model is not compiled or not built, ``x`` has too few rows, or as for ``hk.fit``.
        CollectiveMismatchError, HvdkitError: as for ``hk.fit``.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse", metrics=["mae"])
        >>> x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
        >>> result = hk.check_step(model, x, x[:, :1], batch_size=32, steps=2)
        >>> result.is_equal
        True
    """
    check_all_ranks_call("hk.check_step")
    size = _checked_batch_size(model, x, y, batch_size, steps)
    x, y = tree.map_structure(lambda array: None if array is None else array[: steps * size], (x, y))
    many = StepRecorder(steps)
    with _restored(model), many.observing(model):
        fit(model, x, y, size, shuffle=False, verbose=0, callbacks=[many], loss_scope=loss_scope)
    one = StepRecorder(steps, start=many.recording)
    one.recording.ranks = 1
    with _restored(model), one.observing(model), _alone(model):
        method = keras_method(model, "fit")
        method(x, y, size, shuffle=False, verbose=0, callbacks=[one])
    result = compare_recordings(one.recording, many.recording)
    results = gather(cluster.exchange(), "hk.check_step", lambda: result)
    return next((each for each in results if not each.is_equal), results[0])


def _checked_batch_size(model: keras.Model, x: Arrays, y: Arrays | None, batch_size: int | None, steps: int) -> int:
    """Return the rows per batch, after checking the arguments. An error on one rank raises on all."""

    def check() -> int:
        check_model(model)
        if not is_complete(model):
            remedy = "pass an Input layer, or call the model on a batch first"
            raise ValueError(describe("model", "one that is not built", "a built model", remedy))
        if steps < 1:
            raise ValueError(describe("steps", steps, "at least 1", "pass another number"))
        arrays = [array for array in tree.flatten((x, y)) if array is not None]
        if not arrays or not all(hasattr(array, "shape") and hasattr(array, "__getitem__") for array in arrays):
            got = ", ".join(sorted({type(array).__name__ for array in arrays})) or "nothing"
            raise TypeError(describe("x", got, "arrays", "take some batches of a dataset: next(iter(dataset))"))
        rows = min(len(array) for array in arrays)
        size = rows // steps if batch_size is None else batch_size
        if size < 1 or steps * size > rows:
            expected = f"at least {steps * max(1, size)} rows for {steps} steps"
            raise ValueError(describe("x", f"{rows} rows", expected, "pass more rows, or fewer steps"))
        return size

    sizes = gather(cluster.exchange(), f"hk.check_step(steps={steps}, batch_size={batch_size})", check)
    return sizes[cluster.rank()]


@contextlib.contextmanager
def _alone(model: keras.Model) -> Iterator[None]:
    """Let the model train as in one process: its optimizers combine nothing, and it computes Keras's own statistics.

    If it has shards, whose gradients other ranks compute, too, its optimizers combine them.
    """
    distribute_optimizers(model)
    optimizers = optimizers_of(model)
    combines = any(holding_of(variable) is not None for variable in model.variables)
    with contextlib.ExitStack() as stack:
        stack.enter_context(checked(optimizers))
        for optimizer in optimizers:
            for part in with_inner(optimizer):
                if hasattr(part, "_hvdkit") and not combines:
                    stack.enter_context(swap_attributes(part, _hvdkit=replace(part._hvdkit, combines=False)))
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization):
                stack.enter_context(swap_attributes(layer, _moments=MethodType(type(layer)._moments, layer)))
        yield


@contextlib.contextmanager
def _restored(model: keras.Model) -> Iterator[None]:
    """Restore the variables, optimizers, layers and random generators of a model, and what Keras's ``fit`` sets."""
    names = ("history", "stop_training", "train_function", "test_function", "predict_function", "_initial_epoch")
    attributes = {name: None if name.endswith("_function") else getattr(model, name, None) for name in names}
    for optimizer in optimizers_of(model):
        if not optimizer.built and optimizer is model.optimizer:
            optimizer.build(model.trainable_variables)
    slots = [v for optimizer in all_optimizers(model) for v in optimizer.variables]
    weights = [*model.trainable_variables, *model.non_trainable_variables, *slots]
    before = [(v, np.asarray(v).copy()) for v in {id(v): v for v in weights}.values()]
    forget_session(model)
    with unchanged(model), original_attributes(model), swap_attributes(model, **attributes):
        try:
            yield
        finally:
            forget_session(model)
            for variable, value in before:
                variable.assign(value)
