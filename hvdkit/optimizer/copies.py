"""Copy Keras optimizers, including their state, as instances of another class.

Copies are not made from the optimizer's config: a config cannot hold functions, and an option missing from it silently
gets its default. Instead, Keras's base class creates its own state, and every other attribute is copied one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import keras
import tensorflow as tf

from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.errors import describe
from hvdkit.sharding.shards import assign_whole

T = TypeVar("T", bound=keras.optimizers.Optimizer)
_classes: dict[tuple[type, type], type] = {}
_sharing_iterations: WeakRegistry[bool] = WeakRegistry()  # optimizers that share their iteration count with a copy
# Added after Keras 3.5.
_Map = getattr(keras.optimizers, "OptimizerMap", ())
# Attributes that the constructor of Keras's base class creates, in addition to its arguments.
_STATE = {"_lock", "_tracker", "_variables", "_trainable_variables", "_trainable_variables_indices", "built"} | {
    "_iterations",
    "_learning_rate",
    "_distribution_strategy",
}


@dataclass(frozen=True)
class Original:
    """A plain optimizer that a distributed copy replaces. Not a tuple: Keras would save it with the copy."""

    optimizer: keras.optimizers.Optimizer
    rates: tuple[float, ...]  # its learning rates when it was copied, without those of schedules


def subclass(mixin: type[T], base: type) -> type[T]:
    """Return a subclass of ``mixin`` and ``base`` with the name of ``base``, so that Keras saves it as that class."""
    if (mixin, base) not in _classes:
        # Use the public module, as Keras does in its files: the private one may move.
        public = getattr(keras.optimizers, base.__name__, None) is base
        module = "keras.optimizers" if public else base.__module__
        namespace = {"__module__": module, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
        cls = type(base.__name__, (mixin, base), namespace)
        package, _, name = keras.saving.get_registered_name(base).rpartition(">")
        if package:  # register both under one name; Keras deserializes it as the base
            for each in (cls, base):
                keras.saving.register_keras_serializable(package, name)(each)
        _classes[mixin, base] = cls
    return _classes[mixin, base]


def copy_of(optimizer: keras.optimizers.Optimizer, cls: type[T], *, rebuilds: bool = False, **changed: object) -> T:
    """Return an instance of ``cls`` with the options and state of ``optimizer``, which is not modified.

    The iteration count, the learning rate, the slots and any inner optimizers (also in lists, tuples and dicts) are
    copied; all other attributes are shared. Bound methods stored as attributes are rebound to the copy. If the learning
    rate is a function, it may read the optimizer's ``iterations``, so the copy shares that variable.

    Args:
        optimizer: a Keras optimizer, built or not.
        cls: a subclass of its class.
        rebuilds: if ``optimizer`` is built, let ``cls`` create its own slots, which may be smaller or marked.
        changed: attributes that override those of ``optimizer``.

    Raises:
        TypeError: ``optimizer`` cannot be copied; the message names the attribute.
        ValueError: the learning rate is a function, and ``optimizer`` already has a copy.
    """
    copier = _Copier(optimizer.built and rebuilds)
    copy: T = copier.copy(optimizer, cls, changed)
    steps = changed.get("gradient_accumulation_steps")
    begins_to_accumulate = bool(steps) and not optimizer.gradient_accumulation_steps
    if copier.rebuilds:
        _rebuild(optimizer, copy, copier.skipped, begins_to_accumulate)
    if begins_to_accumulate:
        # Keras's count includes the steps between updates: the next update is due after that many more.
        copy._iterations.assign(copy._iterations * steps)
    return copy


class _Copier:
    """Copies an optimizer and its inner optimizers."""

    def __init__(self, rebuilds: bool):
        self.rebuilds = rebuilds  # skip the variables that build creates, as it will be called again
        self.skipped: list[str] = []  # names of attributes that hold such variables
        self._copied: dict[int, object] = {}  # copies, by the id of the original
        self._slots: set[int] = set()

    def copy(
        self, optimizer: keras.optimizers.Optimizer, cls: type[object], changed: Mapping[str, object]
    ) -> keras.optimizers.Optimizer:
        """Return a copy of ``optimizer`` as an instance of ``cls``, built if ``optimizer`` is (unless ``rebuilds``)."""
        new: keras.optimizers.Optimizer = cls.__new__(cls)
        self._copied[id(optimizer)] = new
        rate = optimizer._learning_rate
        rate = float(rate.numpy()) if isinstance(rate, keras.Variable) else self._copied_value(rate)
        # Call the base constructor: the arguments of cls's constructor are unknown.
        keras.optimizers.Optimizer.__init__(new, learning_rate=rate, name=optimizer.name)
        self._copy_variables(optimizer, new)
        for name, value in vars(optimizer).items():
            if name not in _STATE and name not in changed and not name.startswith(("_self_", "_hvdkit")):
                self._copy_attribute(new, name, value)
        for name, value in changed.items():
            setattr(new, name, value)
        if optimizer.built and not self.rebuilds:
            object.__setattr__(new, "_trainable_variables", list(optimizer._trainable_variables))
            new._trainable_variables_indices.update(optimizer._trainable_variables_indices)
            new.built = True
        return new

    def _copy_variables(self, optimizer: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer) -> None:
        """Create the variables of ``new``, in the order of the optimizer's."""
        rate = optimizer._learning_rate
        if callable(rate) and not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            _share_iterations(optimizer, new)
        new._iterations.assign(optimizer._iterations)
        kept = {id(v): v for v in optimizer._trainable_variables}  # Keras tracks a list of these as the optimizer's own
        kept |= {id(optimizer._iterations): new._iterations, id(optimizer._learning_rate): new._learning_rate}
        self._copied |= kept
        for variable in optimizer._variables:
            if id(variable) not in kept and optimizer.built:
                self._slots.add(id(variable))
                if self.rebuilds:
                    continue
                self._copied[id(variable)] = _clone(variable)
            if variable is not optimizer._iterations and variable is not optimizer._learning_rate:
                new._track_variable(self._copied.get(id(variable), variable))

    def _copy_attribute(self, new: keras.optimizers.Optimizer, name: str, value: object) -> None:
        if self.rebuilds and self._holds_slots(value):
            self.skipped.append(name)
            return
        try:
            setattr(new, name, self._copied_value(value))
        except Exception as error:
            got = f"a {type(value).__name__} that cannot be copied ({error})"
            remedy = "wrap the optimizer before it is built, or make the attribute settable"
            expected = "an attribute that can be copied"
            raise TypeError(describe(f"optimizer.{name}", got, expected, remedy)) from error

    def _copied_value(self, value: object) -> Any:
        """Return the copy's ``value``: slots and optimizers are copied, everything else is shared."""
        if id(value) in self._copied:
            return self._copied[id(value)]
        if isinstance(value, keras.optimizers.Optimizer):
            if self.rebuilds:
                raise TypeError("it is a built optimizer inside another one")
            return self.copy(value, type(value), {})
        if isinstance(value, MethodType) and id(value.__self__) in self._copied:
            return MethodType(value.__func__, self._copied[id(value.__self__)])
        if _Map and isinstance(value, _Map):
            items = {key: self._copied_value(item) for key, item in value.items()}
            return _Map(self._copied_value(value.default_optimizer), items)
        parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
        copies = [self._copied_value(part) for part in parts]
        if all(copied is part for copied, part in zip(copies, parts, strict=True)):
            return value
        if isinstance(value, dict):
            return dict(zip(value, copies, strict=True))
        if isinstance(value, tuple):
            return type(value)(*copies) if hasattr(value, "_fields") else tuple(copies)
        return copies

    def _holds_slots(self, value: object) -> bool:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            return any(map(self._holds_slots, value))
        return id(value) in self._slots


def _rebuild(
    optimizer: keras.optimizers.Optimizer,
    copy: keras.optimizers.Optimizer,
    skipped: list[str],
    begins_to_accumulate: bool,
) -> None:
    """Build the slots of ``copy`` and assign them the values of the optimizer's slots."""
    remedy = "wrap the optimizer before it is built, or create the variable in build() with add_variable_from_reference"
    try:
        copy.build(list(optimizer._trainable_variables))
        missing = [name for name in skipped if not hasattr(copy, name)]
        if missing:
            raise AttributeError(f"build() does not create the variables in {missing[0]!r}")
        new_slots = copy.variables
        old_slots = optimizer.variables
        if begins_to_accumulate:
            sums = {id(v) for v in copy._accumulated_gradients}
            new_slots = [v for v in new_slots if id(v) not in sums]
        if len(new_slots) != len(old_slots):
            raise AttributeError(f"build() creates {len(new_slots)} variables, but the optimizer has {len(old_slots)}")
    except (AttributeError, TypeError, LookupError) as error:
        got = f"{type(optimizer).__name__}, which is built, and whose copy cannot be built ({error})"
        raise TypeError(describe("optimizer", got, "one whose build() creates all of its slots", remedy)) from error
    for new, old in zip(new_slots, old_slots, strict=True):
        assign_whole(new, old)


def _share_iterations(optimizer: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer) -> None:
    if optimizer in _sharing_iterations:
        got = "an optimizer that is already wrapped, with a function as its learning rate"
        remedy = "create a second optimizer, or use a keras.optimizers.schedules.LearningRateSchedule"
        raise ValueError(describe("optimizer", got, "one that counts its own updates", remedy))
    _sharing_iterations.set(optimizer, True)
    new._untrack_variable(new._iterations)
    new._iterations = optimizer._iterations


def _clone(variable: keras.Variable) -> keras.Variable:
    value = variable._value
    options = {"dtype": variable._dtype, "trainable": variable.trainable, "name": variable.name}
    with tf.device(value.device):
        new = keras.Variable(value.read_value(), **options)
    new._path = variable.path  # the key in checkpoints
    return new
