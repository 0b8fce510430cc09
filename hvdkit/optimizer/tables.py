"""Tables with their own optimizer, which updates them during the model optimizer's step at its own learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras

from hvdkit.errors import describe
from hvdkit.optimizer.gradients import Gradient
from hvdkit.sharding.shards import AnyVariable, variable_optimizer


@dataclass(frozen=True)
class TableOptimizers:
    """Copies of the optimizers that the user passed for single tables, owned by a distributed optimizer."""

    by_variable: dict[int, keras.optimizers.Optimizer]  # the copy that updates each variable, by id of the variable
    optimizers: tuple[keras.optimizers.Optimizer, ...]  # all copies, without duplicates

    @classmethod
    def of(
        cls, variables: Sequence[AnyVariable], copy: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]
    ) -> TableOptimizers | None:
        """Build the optimizers of those ``variables`` that have their own; return None if there aren't any.

        ``copy`` returns a copy of a Keras optimizer that supports shards and doesn't combine gradients.
        """
        groups: dict[str, tuple[keras.optimizers.Optimizer, list[AnyVariable]]] = {}
        for variable in variables:
            if (registered := variable_optimizer(variable)) is not None:
                groups.setdefault(registered.key, (registered.optimizer, []))[1].append(variable)
        if not groups:
            return None
        by_variable: dict[int, keras.optimizers.Optimizer] = {}
        optimizers: list[keras.optimizers.Optimizer] = []
        # Checkpoints identify slots by path: use the same path whether a step or the user builds the model's optimizer.
        with keras.name_scope("tables", override_parent=""):
            for plain, members in groups.values():
                optimizer = copy(plain)
                optimizer.build(members)
                optimizers.append(optimizer)
                by_variable |= {id(variable): optimizer for variable in members}
        return cls(by_variable, tuple(optimizers))

    def without_tables(self, variables: Sequence[AnyVariable]) -> list[AnyVariable]:
        """Return the variables that the model's optimizer updates."""
        return [variable for variable in variables if id(variable) not in self.by_variable]

    def apply(
        self, grads: Sequence[Gradient], variables: Sequence[AnyVariable]
    ) -> tuple[list[Gradient], list[AnyVariable]]:
        """Update the tables with their optimizers; return the remaining gradients and variables."""
        pairs = list(zip(grads, variables, strict=True))
        for optimizer in self.optimizers:
            own = [(g, v) for g, v in pairs if self.by_variable.get(id(v)) is optimizer]
            if own:
                optimizer.apply(*map(list, zip(*own, strict=True)))
        rest = [(g, v) for g, v in pairs if id(v) not in self.by_variable]
        return [g for g, _ in rest], [v for _, v in rest]

    def finalize(self, variables: Sequence[AnyVariable]) -> None:
        """Assign the moving averages to the tables among ``variables``, if their optimizers keep any."""
        for optimizer in self.optimizers:
            own = [v for v in variables if self.by_variable.get(id(v)) is optimizer]
            if own:
                optimizer.finalize_variable_values(own)


def check_table_options(accumulate_steps: int, shard_states: bool) -> None:
    """Raise ValueError if gradients are accumulated or slots are sharded: both treat all variables together."""
    where = "with tables that have their own optimizer"
    remedy = "leave it out, or create the tables without optimizer="
    if accumulate_steps > 1:
        raise ValueError(describe("accumulate_steps", accumulate_steps, f"1 {where}", remedy))
    if shard_states:
        raise ValueError(describe("shard_states", True, f"False {where}", remedy))
