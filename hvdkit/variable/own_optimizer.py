"""Variables that have their own optimizer: ``hk.DistributedOptimizer`` leaves their updates to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from hvdkit.marks import WeakRegistry


class OwnOptimizer(NamedTuple):
    """The optimizer of a variable.

    Attributes:
        optimizer: a Keras optimizer, which is copied before it is used.
        key: equal for equal optimizers: variables with one key are updated by one copy.
    """

    optimizer: Any
    key: str


_OWN: WeakRegistry[OwnOptimizer] = WeakRegistry()


def set_own_optimizer(variable: Any, own: OwnOptimizer | None) -> None:
    """Note that ``variable``, a Keras variable, is updated by ``own``; None: by the model's optimizer."""
    if own is None:
        return
    _OWN.set(variable, own)
    inner = getattr(variable, "_value", None)
    if isinstance(inner, tf.Variable):
        _OWN.set(inner, own)


def own_optimizer(variable: Any) -> OwnOptimizer | None:
    """Return the optimizer that ``variable`` has; None for the model's."""
    return _OWN.get(variable)
