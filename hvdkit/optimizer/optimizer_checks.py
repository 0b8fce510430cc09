"""What distributed optimizers check before they combine gradients."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from hvdkit import cluster
from hvdkit.collectives.graphs import refuse_xla
from hvdkit.errors import HvdkitError, describe
from hvdkit.optimizer.row_updates import ELEMENTWISE, updating_class
from hvdkit.sharding.shards import AnyVariable
from hvdkit.sharding.variables import variable_name


def check_elementwise(optimizer: keras.optimizers.Optimizer, where: str) -> None:
    """Raise ValueError if an optimizer takes norms of whole variables: in the case ``where``, ranks have parts."""
    check_norms(optimizer, ("clipnorm", "global_clipnorm"), where)
    kind = updating_class(optimizer)
    if kind.__module__.startswith("keras.") and kind not in ELEMENTWISE:
        expected = f"one that updates each element separately {where}"
        remedy = "use " + ", ".join(sorted(cls.__name__ for cls in ELEMENTWISE))
        raise ValueError(describe("optimizer", kind.__name__, expected, remedy))


def check_norms(optimizer: keras.optimizers.Optimizer, names: Sequence[str], where: str) -> None:
    """Raise ValueError if an optimizer clips by norms, which in the case ``where`` differ between ranks."""
    for name in names:
        if (limit := getattr(optimizer, name, None)) is not None:
            remedy = "pass clip_global_norm to hk.DistributedOptimizer, which sums over ranks"
            raise ValueError(describe(name, limit, f"None {where}", remedy))


def check_for_parts(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise ValueError for a MultiOptimizer with sharded or local variables."""
    if hasattr(optimizer, "optimizers"):
        remedy = "give each of its optimizers its own hk.DistributedOptimizer and apply"
        expected = "one optimizer for sharded or local variables"
        raise ValueError(describe("optimizer", "a MultiOptimizer", expected, remedy))


def check_overwritten(optimizer: keras.optimizers.Optimizer, variables: Sequence[AnyVariable]) -> None:
    """Raise ValueError if gradients of variables that they overwrite would be summed over steps."""
    if optimizer._hvdkit.accumulate_steps == 1 or cluster.size() == 1:
        return
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            got = f"{variable_name(variable)} (overwrite_with_gradient)"
            expected = "variables that gradients update"
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
