"""What distributed optimizers check before they combine gradients."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from hvdkit import cluster
from hvdkit.collectives.graphs import refuse_xla
from hvdkit.errors import HvdkitError, describe
from hvdkit.optimizer.row_updates import ELEMENTWISE, updating_class
from hvdkit.sharding.shards import AnyVariable, Local, holding_of, variable_optimizer
from hvdkit.sharding.variables import variable_name


def check_variables(optimizer: keras.optimizers.Optimizer, variables: Sequence[AnyVariable]) -> None:
    """Raise ValueError if a distributed optimizer cannot be built over ``variables``."""
    _check_overwritten(optimizer, variables)
    if optimizer._hvdkit.shard_states and cluster.size() > 1:
        check_shardable(optimizer)
    for variable in variables:
        holding = holding_of(variable)
        if isinstance(holding, Local):
            _check_norms(optimizer, ("global_clipnorm",), "with local variables")  # all updates would differ by rank
            _reject_multi(optimizer, "for sharded or local variables")
        elif holding is not None and (optimizer._hvdkit_is_for_table or variable_optimizer(variable) is None):
            _check_elementwise(optimizer, "with sharded variables")
            _reject_multi(optimizer, "for sharded or local variables")


def check_inner(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise TypeError if an inner optimizer is distributed, although ``optimizer`` will combine the gradients."""
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    if any(hasattr(part, "_hvdkit") for part in inner):
        got = f"{type(optimizer).__name__} of a DistributedOptimizer"
        expected = "plain Keras optimizers inside"
        remedy = "wrap only the outermost optimizer, so that gradients are combined once"
        raise TypeError(describe("optimizer", got, expected, remedy))


def check_shardable(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise ValueError unless an optimizer updates each element independently."""
    _reject_multi(optimizer, "with shard_states=True")
    _check_elementwise(optimizer, "with shard_states=True")


def _check_elementwise(optimizer: keras.optimizers.Optimizer, where: str) -> None:
    """Raise ValueError if an optimizer takes norms of whole variables: in the case ``where``, ranks have parts."""
    _check_norms(optimizer, ("clipnorm", "global_clipnorm"), where)
    kind = updating_class(optimizer)
    if kind.__module__.startswith("keras.") and kind not in ELEMENTWISE:
        expected = f"one that updates each element separately {where}"
        remedy = "use " + ", ".join(sorted(cls.__name__ for cls in ELEMENTWISE))
        raise ValueError(describe("optimizer", kind.__name__, expected, remedy))


def _check_norms(optimizer: keras.optimizers.Optimizer, names: Sequence[str], where: str) -> None:
    """Raise ValueError if an optimizer clips by norms, which in the case ``where`` differ between ranks."""
    for name in names:
        if (limit := getattr(optimizer, name, None)) is not None:
            remedy = "pass clip_global_norm to hk.DistributedOptimizer, which sums over ranks"
            raise ValueError(describe(name, limit, f"None {where}", remedy))


def _reject_multi(optimizer: keras.optimizers.Optimizer, where: str) -> None:
    if hasattr(optimizer, "optimizers"):
        remedy = "give each of its optimizers its own hk.DistributedOptimizer(...) and apply"
        raise ValueError(describe("optimizer", "a MultiOptimizer", f"one optimizer {where}", remedy))


def _check_overwritten(optimizer: keras.optimizers.Optimizer, variables: Sequence[AnyVariable]) -> None:
    """Raise ValueError if gradients that overwrite variables would be divided among ranks or summed over steps."""
    overwritten = [v for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if not overwritten or cluster.size() == 1:
        return
    got = f"{variable_name(overwritten[0])} (overwrite_with_gradient)"
    expected = "variables that gradients update"
    if optimizer._hvdkit.shard_states:
        remedy = "leave shard_states out for models with float8 layers"
        raise ValueError(describe("variables", got, expected, remedy))
    if optimizer._hvdkit.accumulate_steps > 1:
        raise ValueError(describe("variables", got, expected, "use accumulate_steps=1 with float8 layers"))


def reject_unsupported(wrapped: bool = False) -> None:
    """Reject XLA, and a LossScaleOptimizer around this one: other ranks would wait for the one that overflows."""
    if cluster.size() == 1:
        return
    refuse_xla()
    if wrapped:
        got = "a LossScaleOptimizer around a DistributedOptimizer, which skips apply() on the rank that overflows"
        expected = "apply() on every rank at every step"
        remedy = "wrap the other way round: hk.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
        raise HvdkitError(describe("optimizer", got, expected, remedy))


def too_late(name: str) -> str:
    """Return the message about a variable that became local after the optimizer was built."""
    got = f"{name}, made local after the optimizer was built"
    expected = "local variables that it was built with"
    return describe("variables", got, expected, "call hk.register_local_variables before the optimizer's first step")
