"""Per-variable optimizers, to which ``hk.DistributedOptimizer`` delegates updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from hvdkit.collectives.marks import WeakRegistry


class OwnOptimizer(NamedTuple):
    """The optimizer of a variable.

    Attributes:
        optimizer: a Keras optimizer; it is copied before use.
        key: equal for equal optimizers: variables with the same key share a copy.
    """

    optimizer: Any
    key: str


_OWN: WeakRegistry[OwnOptimizer] = WeakRegistry()


def set_own_optimizer(variable: Any, own: OwnOptimizer | None) -> None:
    """Set ``own`` as the optimizer of ``variable``, a Keras variable; None keeps the model's optimizer."""
    if own is None:
        return
    _OWN.set(variable, own)
    inner = getattr(variable, "_value", None)
    if isinstance(inner, tf.Variable):
        _OWN.set(inner, own)


def own_optimizer(variable: Any) -> OwnOptimizer | None:
    """Return the optimizer of ``variable``; None for the model's optimizer."""
    return _OWN.get(variable)
