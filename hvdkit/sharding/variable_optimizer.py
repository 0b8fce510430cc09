"""Optimizers of single variables, to which ``hk.DistributedOptimizer`` delegates their updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.sharding.shards import AnyVariable

if TYPE_CHECKING:
    import keras


class VariableOptimizer(NamedTuple):
    """The optimizer of a variable.

    Attributes:
        optimizer: a Keras optimizer; it is copied before use.
        key: equal for equal optimizers: variables with the same key share a copy.
    """

    optimizer: keras.optimizers.Optimizer
    key: str


_OPTIMIZERS: WeakRegistry[VariableOptimizer] = WeakRegistry()


def set_variable_optimizer(variable: AnyVariable, optimizer: VariableOptimizer | None) -> None:
    """Set ``optimizer`` as the optimizer of ``variable``, a Keras variable; None keeps the model's optimizer."""
    if optimizer is None:
        return
    _OPTIMIZERS.set(variable, optimizer)
    inner = getattr(variable, "_value", None)
    if isinstance(inner, tf.Variable):
        _OPTIMIZERS.set(inner, optimizer)


def variable_optimizer(variable: AnyVariable) -> VariableOptimizer | None:
    """Return the optimizer of ``variable``; None for the model's optimizer."""
    return _OPTIMIZERS.get(variable)
