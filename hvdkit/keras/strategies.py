"""Models built under a strategy of ``tf.distribute``, which is left in many programs that move to hvdkit.

A strategy distributes a model over the devices of one process, or of its own cluster. ``hk.fit`` takes over, with one
process for each device: it trains the first copy of each variable and ignores the strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import tensorflow as tf

from hvdkit.cluster import is_chief, size
from hvdkit.cluster.logs import warn_once
from hvdkit.errors import HvdkitError, describe
from hvdkit.internals import context

if TYPE_CHECKING:
    import keras

T = TypeVar("T")
_REMEDY = "remove strategy.scope(): hvdkit's ranks replace the strategy"


@contextlib.contextmanager
def outside_strategy() -> Iterator[None]:
    """On one rank, leave the caller's ``strategy.scope()`` in this context, with a warning.

    A scope is a property of TensorFlow's default graph, also in eager mode, so another default graph has none.
    """
    if not tf.distribute.has_strategy() or size() > 1:
        yield
        return
    _warn(f"a call inside the scope of {type(tf.distribute.get_strategy()).__name__}")
    with tf.Graph().as_default(), context.eager_mode():
        yield


def check_no_scope() -> None:
    """Raise HvdkitError inside ``strategy.scope()``, where new variables would belong to the strategy.

    On one rank the caller never is: see :func:`outside_strategy`.
    """
    if tf.distribute.has_strategy():
        got = f"a call inside the scope of {type(tf.distribute.get_strategy()).__name__}"
        raise HvdkitError(describe("tf.distribute", got, "a call outside of it", _REMEDY))


def undistributed(data: T, argument: str) -> T | tf.data.Dataset:
    """Return the data; on one rank, the dataset that a strategy has distributed, with its global batches.

    On several ranks, raise HvdkitError for such data.
    """
    if not isinstance(data, tf.distribute.DistributedDataset):
        return data
    if size() > 1:
        got = f"a {type(data).__name__} of tf.distribute"
        remedy = "pass the dataset itself: hvdkit's ranks replace the strategy"
        raise HvdkitError(describe(argument, got, "a tf.data.Dataset", remedy))
    _warn(f"{argument} was distributed by a strategy")
    make_dataset = getattr(data, "_dataset_fn", None)  # of distribute_datasets_from_function
    return data._original_dataset if make_dataset is None else make_dataset(tf.distribute.InputContext())


def leave_strategy(model: keras.Model, optimizers: list[keras.Optimizer]) -> None:
    """Make a model that was built under a strategy, with its optimizers, a plain one, permanently."""
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is None:
        return
    if is_chief():
        _warn(f"the model was built under {type(strategy).__name__}")
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


def _warn(what: str) -> None:
    warn_once(f"tf.distribute: {what}, which is ignored; {_REMEDY}")
