"""Models built under a strategy of ``tf.distribute``, which is left in many programs that move to hvdkit.

A strategy distributes a model over the devices of one process, or of its own cluster. ``hk.fit`` takes over, with one
process for each device: it trains the first copy of each variable and ignores the strategy.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.cluster import is_chief
from hvdkit.cluster.logs import warn_once
from hvdkit.errors import HvdkitError, describe

_REMEDY = "remove strategy.scope(): hk.fit distributes the training"


def check_no_scope() -> None:
    """Check that the caller is not inside ``strategy.scope()``, where new variables would belong to the strategy.

    Raises:
        HvdkitError: it is.
    """
    if tf.distribute.has_strategy():
        got = f"a call inside the scope of {type(tf.distribute.get_strategy()).__name__}"
        raise HvdkitError(describe("tf.distribute", got, "a call outside of it", _REMEDY))


def leave_strategy(model: Any, optimizers: list[Any]) -> None:
    """Make a model that was built under a strategy a plain one, permanently.

    Args:
        model: a Keras model.
        optimizers: its optimizers.
    """
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is None:
        return
    if is_chief():
        name = type(strategy).__name__
        warn_once(f"tf.distribute: the model was built under {name}, which is ignored; {_REMEDY}")
    variables = [*model.variables, *model.metrics_variables, *(v for each in optimizers for v in each.variables)]
    for variable in variables:
        if isinstance(value := getattr(variable, "_value", None), tf.distribute.DistributedValues):
            # A new variable: a copy of a distributed one keeps a reference to it.
            first = strategy.experimental_local_results(value)[0]
            variable._value = tf.Variable(first.read_value(), trainable=value.trainable, name=variable.name)
    for optimizer in optimizers:
        optimizer._distribution_strategy = tf.distribute.get_strategy()
    object.__setattr__(model, "_distribute_strategy", None)
    for name in ("train_function", "test_function", "predict_function"):
        object.__setattr__(model, name, None)
