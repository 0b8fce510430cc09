"""Copies of Keras optimizers, as another class and with their state."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.collectives.shards import assign_whole
from hvdkit.errors import describe

_classes: dict[tuple[type, type], type] = {}


def subclass(mixin: type, base: type) -> Any:
    """Return ``base`` with ``mixin`` before it, under the name of ``base`` so that Keras saves it as that class."""
    if (mixin, base) not in _classes:
        # Keras writes its public module into files, and so do we: the private one may move.
        public = getattr(keras.optimizers, base.__name__, None) is base
        module = "keras.optimizers" if public else base.__module__
        namespace = {"__module__": module, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
        _classes[mixin, base] = type(base.__name__, (mixin, base), namespace)
    return _classes[mixin, base]


def copy_of(optimizer: Any, cls: Any, accumulate_steps: int = 1) -> Any:
    try:
        config = optimizer.get_config()
        if isinstance(getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule):
            config["learning_rate"] = optimizer._learning_rate  # itself: Keras would look for a registered class
        if accumulate_steps > 1:
            config["gradient_accumulation_steps"] = accumulate_steps
        copy = cls.from_config(config)
    except Exception as error:
        raise TypeError(
            describe(
                "optimizer",
                f"{type(optimizer).__name__} that cannot be copied ({error})",
                "an optimizer whose get_config and from_config round-trip",
                "give it and its learning rate schedule a get_config",
            )
        ) from error
    for name, value in vars(optimizer).items():
        if name.startswith("_exclude_from_weight_decay"):  # said after construction, and in no config
            setattr(copy, name, value)
    if optimizer.built:
        copy.build(optimizer._trainable_variables)
        _copy_state(optimizer, copy, accumulate_steps)
    return copy


def _copy_state(optimizer: Any, copy: Any, accumulate_steps: int) -> None:
    """Give ``copy`` the iteration count and slots of ``optimizer``, which may be without sums of gradients so far."""
    mine, theirs = copy.variables, optimizer.variables
    begins_to_accumulate = len(mine) > len(theirs)
    if begins_to_accumulate:
        sums = {id(v) for v in copy._accumulated_gradients}
        mine = [v for v in mine if id(v) not in sums]
    for own, other in zip(mine, theirs, strict=True):
        assign_whole(own, other)
    if begins_to_accumulate:
        # Keras counts the steps between updates, too: the next update is due after that many more.
        copy._iterations.assign(optimizer._iterations * accumulate_steps)
