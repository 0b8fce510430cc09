"""The optimizers inside a LossScaleOptimizer or MultiOptimizer, and the variables of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import keras

from hvdkit.sharding.shards import AnyVariable

LossScale = keras.optimizers.LossScaleOptimizer


def updater_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer that updates the variables: of a LossScaleOptimizer, the one inside.

    An optimizer that a user has written may use an attribute ``inner_optimizer`` in any way.
    """
    return optimizer.inner_optimizer if isinstance(optimizer, LossScale) else optimizer


def updaters_of(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that update the variables: also those inside a MultiOptimizer, which has no rate."""
    updater = updater_of(optimizer)
    return list(getattr(updater, "optimizers", [updater]))


def with_inner(optimizer: keras.optimizers.Optimizer | None) -> Iterator[keras.optimizers.Optimizer]:
    """Yield ``optimizer`` and the inner optimizers of a LossScaleOptimizer or MultiOptimizer."""
    yield optimizer
    inner = [optimizer.inner_optimizer] if isinstance(optimizer, LossScale) else getattr(optimizer, "optimizers", ())
    for each in inner:
        yield from with_inner(each)


def trained_by(optimizer: keras.optimizers.Optimizer) -> Sequence[AnyVariable]:
    """Return the variables that ``optimizer`` was built over, including tables that have their own optimizer."""
    trained: Sequence[AnyVariable] = getattr(optimizer, "_hvdkit_trained", ()) or optimizer._trainable_variables
    return trained


def keeps_averages(optimizer: keras.optimizers.Optimizer | None) -> bool:
    """Return True if Keras replaces weights by their moving averages at the end of ``fit``, also those of a table."""
    parts = list(with_inner(optimizer))
    tables = [found for part in parts if (found := getattr(part, "_hvdkit_tables", None)) is not None]
    parts += [each for found in tables for each in found.optimizers]
    return any(getattr(part, "use_ema", False) for part in parts)


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[AnyVariable]:
    """Return slots and counters, without the gradients that each rank has accumulated."""
    sums = {id(v) for v in gradient_sums_of(optimizer)}
    return [v for v in optimizer.variables if id(v) not in sums]


def gradient_sums_of(optimizer: keras.optimizers.Optimizer) -> list[AnyVariable]:
    """Return the gradients accumulated since the last update, of which each rank has its own."""
    return [v for part in with_inner(optimizer) for v in getattr(part, "_accumulated_gradients", ())]
