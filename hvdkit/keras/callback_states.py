"""The state of a ``fit``'s callbacks, as a Supervisor saves and restores it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import keras
import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.checkpoint.entries import BEST_WEIGHTS
from hvdkit.errors import CorruptCheckpointError, describe
from hvdkit.keras.chief import is_on_chief
from hvdkit.machine.replacing import replaced
from hvdkit.sharding.shards import AnyVariable, Local, Shard, holding_of, set_holding

T = TypeVar("T")
# What Keras's callbacks decide by. Those that read a quantity compare it with their `best`, a number or None.
_COUNTERS = ("wait", "stopped_epoch", "best_epoch", "cooldown_counter")
_DECIDING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.ModelCheckpoint,
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),  # since Keras 3.14
)


class RestorableState(Protocol):
    """What continues with a state that is saved as JSON."""

    @property
    def state(self) -> Mapping[str, object]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


def _defines_state(callback: object) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(getattr(callback, "set_state", None))


class CallbackStates:
    """The states of callbacks by class name, of which equal ones are numbered.

    Args:
        own: those of hvdkit, with ``state`` and ``restore``. They are restored at once.
        others: any callbacks of the same ``fit``. Keras's callbacks reset their state when training begins, so that
            theirs is restored by :meth:`apply`.
    """

    def __init__(self, own: Iterable[RestorableState], others: Iterable[keras.callbacks.Callback]):
        self._own = _by_name(own)
        self._others = _by_name(each for each in others if isinstance(each, _DECIDING) or _defines_state(each))
        self._restored: Mapping[str, Any] = {}
        self._best_weights = {
            name: _BestWeights(each)
            for name, each in self._others.items()
            if isinstance(each, keras.callbacks.EarlyStopping) and each.restore_best_weights and not is_on_chief(each)
        }

    @property
    def change_at_end(self) -> bool:
        """Whether there are states on this rank that change at the end of an epoch."""
        return bool(self._others)

    def to_save(self) -> dict[str, object]:
        """Return what a Supervisor saves as ``state``."""
        return {"callbacks": self, BEST_WEIGHTS: self._best_weights}

    @property
    def state(self) -> dict[str, object]:
        """The states of all callbacks, JSON-serializable."""
        states = {name: callback.state for name, callback in self._own.items()}
        return states | {name: _read(name, callback) for name, callback in self._others.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the states of hvdkit's callbacks, and keep the others for :meth:`apply`."""
        for name, callback in self._own.items():
            if name in state:
                callback.restore(state[name])
        self._restored = {name: state[name] for name in self._others if name in state}
        for name, saved in self._restored.items():
            if not _defines_state(self._others[name]) and not _is_state(saved):
                raise CorruptCheckpointError(f"{name}: got {ascii(saved)[:80]}, expected counters and the best value")

    def apply(self, *, last: bool = False) -> None:
        """Restore the states of the other callbacks, after they have begun training; after ``last``, never again."""
        for name, saved in self._restored.items():
            callback = self._others[name]
            if _defines_state(callback):
                callback.set_state(saved)
                continue
            for attribute in _COUNTERS:
                if hasattr(callback, attribute) and attribute in saved:
                    setattr(callback, attribute, saved[attribute])
            callback.best = None if saved.get("best") is None else float(saved["best"])
            if name in self._best_weights and saved.get("has_best_weights"):
                callback.best_weights = self._best_weights[name].arrays()
            if isinstance(callback, keras.callbacks.EarlyStopping) and not _has_stopped(callback, saved):
                callback.stopped_epoch = 0
        self._restored = {} if last else self._restored

    @property
    def stopped_by(self) -> str:
        """The class of the restored ``EarlyStopping`` that has ended the run, or ""."""
        for name, callback in self._others.items():
            is_stopping = isinstance(callback, keras.callbacks.EarlyStopping)
            if is_stopping and _has_stopped(callback, self._restored.get(name)):
                return type(callback).__name__
        return ""


def _by_name(callbacks: Iterable[T]) -> dict[str, T]:
    found: dict[str, T] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        names = itertools.chain([kind], (f"{kind}{number}" for number in itertools.count(1)))
        found[next(name for name in names if name not in found)] = callback
    return found


def _read(name: str, callback: keras.callbacks.Callback) -> object:
    """Return the state of a callback of Keras or the user."""
    if _defines_state(callback):
        saved = callback.get_state()
        try:
            json.dumps(saved)
        except (TypeError, ValueError) as error:
            remedy = "return numbers, texts, lists and dicts of these"
            raise TypeError(
                describe(f"{name}.get_state()", f"a value of which {error}", "plain JSON", remedy)
            ) from None
        return saved
    state: dict[str, object] = {name: int(getattr(callback, name)) for name in _COUNTERS if hasattr(callback, name)}
    if getattr(callback, "best_weights", None) is not None:
        state["has_best_weights"] = True
    best = None if callback.best is None else float(callback.best)
    return {**state, "best": best if best is None or math.isfinite(best) else str(best)}


def _is_state(saved: object) -> bool:
    if not isinstance(saved, Mapping) or any(type(saved.get(name, 0)) is not int for name in _COUNTERS):
        return False
    best = saved.get("best")
    if isinstance(best, str):  # a number as text: JSON has no infinity
        try:
            float(best)
        except ValueError:
            return False
    return isinstance(best, float | int | str | None)


def _has_stopped(callback: keras.callbacks.EarlyStopping, saved: object) -> bool:
    """Return True if an ``EarlyStopping`` with this state has ended the run, and would with its present patience."""
    if not isinstance(saved, Mapping):
        return False
    epoch = saved.get("stopped_epoch")
    wait = saved.get("wait")  # a user's get_state may return anything under these keys
    return isinstance(epoch, int) and isinstance(wait, int) and epoch > 0 and wait >= callback.patience


class _BestWeights:
    """The weights that an ``EarlyStopping`` restores at the end, in variables that are saved like the model's.

    Keras holds them as arrays, in the order of the model's weights.
    """

    def __init__(self, callback: keras.callbacks.EarlyStopping):
        self._callback = callback
        self._variables: list[tf.Variable] = []

    def checkpoint_state(self) -> dict[str, tf.Variable]:
        """Return the variables, with the best weights so far; without some, with zeros."""
        if not self._variables:
            with tf.device("CPU:0"):
                self._variables = [_like(weight) for weight in self._callback.model.weights]
        best: Sequence[np.ndarray] | None = self._callback.best_weights
        if best is not None:
            for variable, values in zip(self._variables, best, strict=True):
                variable.assign(values)
        return {str(number): variable for number, variable in enumerate(self._variables)}

    def arrays(self) -> list[np.ndarray]:
        """Return the restored weights."""
        return [variable.numpy() for variable in self._variables]


def _like(weight: AnyVariable) -> tf.Variable:
    """Return a variable of zeros that holds the same part of a global array as a model's weight."""
    value = getattr(weight, "_value", weight)
    variable = tf.Variable(tf.zeros(value.shape, value.dtype), trainable=False)
    holding = holding_of(weight)
    if isinstance(holding, Shard):
        set_holding(variable, holding.of_slot("best"))
    elif isinstance(holding, Local):
        set_holding(variable, holding)
    return variable


def continue_logs(callbacks: Iterable[keras.callbacks.Callback], epoch: int) -> None:
    """Have each ``CSVLogger`` of the chief append to its file, without the rows of epochs that are trained again.

    Call it before training begins. ``epoch`` is the number of the first epoch that will end, from 0.
    """
    loggers = [each for each in callbacks if isinstance(each, keras.callbacks.CSVLogger)]
    for logger in loggers if cluster.is_chief() else []:
        logger.append = True
        path = Path(logger.filename)
        if path.exists():
            before = path.read_text()
            lines = before.splitlines(keepends=True)
            while lines and (number := lines[-1].split(logger.sep)[0]).isdecimal() and int(number) >= epoch:
                lines.pop()
            with replaced(path, path.with_name(f".{path.name}.tmp")) as temporary:
                temporary.write_text("".join(lines))


def check_callbacks(
    callbacks: keras.callbacks.Callback | Iterable[keras.callbacks.Callback],
) -> list[keras.callbacks.Callback]:
    """Return the ``callbacks`` of a run that is saved as a list.

    Raises:
        TypeError: one of them is not a Keras callback.
        ValueError: one of them leaves averages in the model at the end of an epoch.
    """
    found = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else list(callbacks)
    for each in found:
        if not isinstance(each, keras.callbacks.Callback):
            raise TypeError(describe("callbacks", each, "Keras callbacks", "pass objects of the list given to fit"))
    refuse_swapped_averages(found)
    return found


def refuse_swapped_averages(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Raise ValueError for a callback that leaves averages in the model when a run is saved."""
    for each in callbacks:
        if isinstance(each, keras.callbacks.SwapEMAWeights) and each.swap_on_epoch:
            expected = "swap_on_epoch=False in a run that is saved, which would continue from averages"
            raise ValueError(describe("callbacks", "SwapEMAWeights(swap_on_epoch=True)", expected, "leave it out"))
