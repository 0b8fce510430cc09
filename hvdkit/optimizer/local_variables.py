"""Local variables: each rank has its own values, and gradients are not exchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

from hvdkit.collectives.digests import tf_variable
from hvdkit.errors import describe
from hvdkit.sharding.shards import AnyVariable, Local, set_holding, shard_of
from hvdkit.sharding.variables import variable_name

if TYPE_CHECKING:
    import keras


def register_local_variables(variables: AnyVariable | Iterable[AnyVariable] | keras.layers.Layer) -> None:
    """Make variables local: each rank has its own values, which are not averaged, broadcast or compared.

    ``hk.DistributedOptimizer``, ``hk.DistributedGradientTape`` and ``hk.average_gradients(variables=...)`` do not
    exchange the gradient of a local variable. They only scale it, so that it equals the gradient of the loss on the
    global batch. With g_r the gradient of rank r's loss, N ranks with different batches, and optional weights w_r:

        Average   g_r / N,  or with weights  w_r g_r / sum_r w_r
        Sum       g_r,      or with weights  w_r g_r

    ``hk.broadcast_variables``, ``hk.compare_variables`` and the Supervisor's comparison skip local variables and their
    slots. A checkpoint contains the values of each rank. If it is restored on another number of ranks, the ranks that
    saved get their values back, and additional ranks keep their initial values.

    Call this on every rank, before the optimizer is built and before the first step. Shapes may differ between ranks.

    Args:
        variables: one or several TensorFlow or Keras variables, or a built Keras layer (all of its weights).

    Raises:
        TypeError: ``variables`` contains something else.
        ValueError: a layer is not built, or a variable is sharded.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> adapter = keras.layers.Dense(4)
        >>> adapter.build((None, 16))
        >>> hk.register_local_variables(adapter)
        >>> adapter.set_weights([np.zeros((16, 4)), np.full(4, hk.rank())])
        >>> hk.broadcast_variables(adapter.variables)  # skips them
        >>> adapter.bias.numpy().tolist() == [hk.rank()] * 4
        True
    """
    for variable in _listed(variables):
        tf_variable(variable)
        if shard_of(variable) is not None:
            got = f"{variable_name(variable)}, which is sharded"
            remedy = "leave it out: each rank has its own part of it already"
            raise ValueError(describe("variables", got, "variables that each rank has whole", remedy))
        set_holding(variable, Local())


def is_layer(item: object) -> TypeGuard[keras.layers.Layer]:
    """Return True for a Keras layer or model."""
    return hasattr(item, "weights") and hasattr(item, "built")


def _listed(variables: AnyVariable | Iterable[AnyVariable] | keras.layers.Layer) -> list[AnyVariable]:
    if is_layer(variables):
        if not variables.built:
            got = f"layer {variables.name!r}, which is not built"
            raise ValueError(describe("variables", got, "a layer that has its variables", "build or call it first"))
        return list(variables.weights)
    # Check for a variable first: TensorFlow variables are iterable, by rows.
    if hasattr(variables, "assign") or not isinstance(variables, Iterable):
        return [variables]
    return list(variables)
