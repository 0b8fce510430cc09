"""What distributed optimizers check before they combine gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import keras

from hvdkit import cluster
from hvdkit.collectives.graphs import refuse_xla
from hvdkit.errors import HvdkitError, describe
from hvdkit.optimizer.gradients import Gradient, PlacedGradients, place_gradients
from hvdkit.optimizer.row_updates import ELEMENTWISE, updating_class
from hvdkit.sharding.shards import AnyVariable
from hvdkit.sharding.variables import variable_name


def prepare_gradients(
    optimizer: keras.optimizers.Optimizer,
    grads: Iterable[Gradient],
    trainable_variables: Iterable[AnyVariable] | None,
) -> PlacedGradients:
    """Check the arguments of ``apply`` and build the optimizer. All errors before an exchange are raised here."""
    if trainable_variables is None and not optimizer.built:
        expected = "variables, because the optimizer is not built yet"
        raise ValueError(describe("trainable_variables", None, expected, "pass them, or call optimizer.build first"))
    variables = variables_of(optimizer, trainable_variables)
    grads = list(grads) if isinstance(grads, Iterator) else grads
    if isinstance(grads, (list, tuple)) and not grads:  # Keras treats this as a step without an update
        variables = []
    placed = place_gradients(grads, variables)
    if not optimizer.built:
        is_multi = hasattr(optimizer, "optimizers")  # MultiOptimizer doesn't create a name scope
        with contextlib.nullcontext() if is_multi else keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
    tables = getattr(optimizer, "_hvdkit_tables", None)
    optimizer._check_variables_are_known(variables if tables is None else tables.without_tables(variables))
    known = getattr(optimizer, "inner_optimizer", optimizer)._hvdkit_local_keys
    for variable, kind in zip(variables, placed.kinds, strict=True):
        if kind == "local" and optimizer._var_key(variable) not in known:
            raise ValueError(too_late(variable_name(variable)))
    return placed


def variables_of(optimizer: keras.optimizers.Optimizer, variables: Iterable[AnyVariable] | None) -> list[AnyVariable]:
    """Return the variables of the gradients passed to ``apply``."""
    return list(optimizer._trainable_variables if variables is None else variables)


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
