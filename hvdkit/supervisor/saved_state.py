"""The state that a Supervisor saves, under fixed keys."""

from __future__ import annotations

import contextlib
import numbers
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit.errors import CorruptCheckpointError, describe, integer
from hvdkit.internals import global_seed_generator
from hvdkit.optimizer.inner_optimizers import updater_of
from hvdkit.sharding.shards import AnyVariable


class RandomGenerators:
    """The random generators of this process (Python, NumPy, Keras, TensorFlow); each rank has its own states.

    TensorFlow's stateful ops (``tf.random.uniform`` etc.) keep their state inside compiled kernels, where it cannot be
    read, so runs that use them are not reproducible. Use ``keras.random``, ``tf.random.stateless_*`` or a
    ``tf.random.Generator`` instead.
    """

    def checkpoint_state(self) -> dict[str, object]:
        """Return the generators by name."""
        generators = {"python": random, "numpy": np.random, "keras": global_seed_generator()}
        with contextlib.suppress(RuntimeError):  # enable_op_determinism forbids an unset generator
            generators["tensorflow"] = tf.random.get_global_generator()
        return generators


class Position:
    """The step and the position of the data at the end of the last step.

    A save during a step must not count the current batch as done.

    Attributes:
        step: number of steps trained.
    """

    def __init__(self, data: Any):
        self.step = 0
        self._source = data
        self._data = data if hasattr(data, "state") and hasattr(data, "restore") else None
        self._data_state: object = None if self._data is None else self._data.state

    @property
    def examples_per_step(self) -> float | None:
        """The rows of a global batch, on average, or None if they are unknown."""
        plan = getattr(self._source, "plan", None)
        return None if plan is None else plan.mean_batch_size

    @property
    def follows_data(self) -> bool:
        """Whether the data report their position."""
        return self._data is not None

    def advance(self, steps: int, *, prefetched: bool) -> None:
        """Advance by ``steps``; with ``prefetched``, the data are ahead of training."""
        self.step += steps
        if self._data is not None:
            self._data_state = self._data.state_at(self.step) if prefetched else self._data.state

    @property
    def state(self) -> dict[str, object]:
        """The state to save in the manifest."""
        return {"global_step": self.step, "data": self._data_state}

    def restore(self, state: dict[str, object]) -> None:
        """Restore a saved position, after checking it."""
        step = state.get("global_step") if isinstance(state, dict) else None
        if type(step) is not int or step < 0 or "data" not in state:
            raise CorruptCheckpointError(f"got {ascii(state)[:80]}, expected global_step and data")
        if isinstance(self._data_state, dict) and not isinstance(state["data"], dict | None):
            raise CorruptCheckpointError(f"data: got {ascii(state['data'])[:80]}, expected an object or null")
        self.step = step
        if self._data is not None and state["data"] is not None:
            self._data.restore(state["data"])
            self._data_state = state["data"]


def to_float(name: str, value: object) -> float:
    """Convert a value passed to ``step`` to a float. Raises TypeError with its name if it is not a number."""
    try:
        return float(np.asarray(value).item())
    except (TypeError, ValueError) as error:
        got = f"{type(value).__name__} {list(getattr(value, 'shape', ()))}" if hasattr(value, "shape") else value
        remedy = "pass its mean, e.g. tf.reduce_mean(loss)"
        raise TypeError(describe(f"step({name}=...)", got, "one number", remedy)) from error


def check_intervals(steps: Mapping[str, object], save_model_secs: object) -> None:
    """Raise if an argument of the Supervisor is neither a number of steps or checkpoints >= 1 nor None."""
    for name, value in steps.items():
        if value is not None:
            integer(name, value, minimum=1)
    if save_model_secs is None:
        return
    message = describe("save_model_secs", save_model_secs, "seconds > 0, or None", "pass e.g. 600")
    if isinstance(save_model_secs, bool) or not isinstance(save_model_secs, numbers.Real):
        raise TypeError(message)
    if not float(save_model_secs) > 0:
        raise ValueError(message)


def state_to_save(
    model: keras.Model | None,
    optimizer: keras.optimizers.Optimizer | None,
    variables: AnyVariable | Iterable[AnyVariable],
    extra: Mapping[str, object] | None,
    position: Position,
) -> Callable[[], dict[str, object]]:
    """Return a function that returns the state to save, under the keys used to restore it."""
    if model is not None and not isinstance(model, keras.layers.Layer):
        raise TypeError(describe("model", type(model).__name__, "a Keras model", "pass variables in variables=[...]"))
    if model is not None and not model.built:
        remedy = "give its first layer an Input, call model.build(shape), or call it once"
        expected = "a built model, whose variables can be saved"
        raise ValueError(describe("model", "a model that is not built", expected, remedy))
    variables = [variables] if isinstance(variables, tf.Variable | keras.Variable) else list(variables)
    for variable in variables:
        if not isinstance(variable, tf.Variable | keras.Variable):
            remedy = "pass anything else in state={...}"
            raise TypeError(describe("variables", type(variable).__name__, "variables", remedy))
    passed = {"model": model, "optimizer": optimizer, "variables": variables or None, "state": extra or None}
    passed = {name: value for name, value in passed.items() if value is not None}
    return lambda: {**passed, "random": RandomGenerators(), "position": position}


def built_optimizer(
    model: keras.Model | None, optimizer: keras.optimizers.Optimizer | None
) -> keras.optimizers.Optimizer | None:
    """Return the optimizer to save, after building it; by default the one that ``model`` was compiled with."""
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
        remedy = "pass the optimizer that trains the model"
        raise TypeError(describe("optimizer", optimizer, "a Keras optimizer", remedy))
    if optimizer is not None and not optimizer.built:
        if model is None:
            remedy = "call optimizer.build(variables)"
            raise ValueError(describe("optimizer", "an optimizer that is not built", "a built optimizer", remedy))
        optimizer.build(model.trainable_variables)
    return optimizer


def current_rate(optimizer: keras.optimizers.Optimizer | None) -> float | None:
    """Return the learning rate that ``optimizer`` keeps in a variable; None if it uses a schedule."""
    rate = None if optimizer is None else updater_of(optimizer)._learning_rate
    return float(np.asarray(rate)) if isinstance(rate, keras.Variable) else None
