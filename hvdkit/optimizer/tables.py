"""Tables that have their own optimizer: it updates them in the model optimizer's step, with its own learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from hvdkit.errors import describe
from hvdkit.variable.own_optimizer import own_optimizer


@dataclass(frozen=True)
class TableOptimizers:
    """Copies of the tables' optimizers, as a distributed optimizer holds them.

    Attributes:
        owners: of each variable with its own optimizer, by id, that copy.
        copies: all of them, each once.
    """

    owners: dict[int, Any]
    copies: tuple[Any, ...]

    @classmethod
    def of(cls, variables: Sequence[Any], copy: Callable[[Any], Any]) -> TableOptimizers | None:
        """Return the optimizers of those of ``variables`` that have their own, built; None if none has.

        Args:
            variables: of a model.
            copy: returns a copy of a Keras optimizer that knows shards, and combines no gradients.
        """
        groups: dict[str, list[Any]] = {}
        for variable in variables:
            if (own := own_optimizer(variable)) is not None:
                groups.setdefault(own.key, []).append(variable)
        if not groups:
            return None
        owners: dict[int, Any] = {}
        copies: list[Any] = []
        # Under one path, by which checkpoints know the slots, whether a step or the user builds the model's optimizer.
        with keras.name_scope("tables", override_parent=""):
            for members in groups.values():
                made = copy(own_optimizer(members[0]).optimizer)  # type: ignore[union-attr]
                made.build(members)
                copies.append(made)
                owners |= {id(variable): made for variable in members}
        return cls(owners, tuple(copies))

    def others(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables that the model's optimizer updates."""
        return [variable for variable in variables if id(variable) not in self.owners]

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Update the tables by their optimizers; return the other gradients and variables."""
        pairs = list(zip(grads, variables, strict=True))
        for optimizer in self.copies:
            own = [(g, v) for g, v in pairs if self.owners.get(id(v)) is optimizer]
            if own:
                optimizer.apply(*map(list, zip(*own, strict=True)))
        rest = [(g, v) for g, v in pairs if id(v) not in self.owners]
        return [g for g, _ in rest], [v for _, v in rest]

    def finalize(self, variables: Sequence[Any]) -> None:
        """Give the tables among ``variables`` their moving averages, if their optimizers keep any."""
        for optimizer in self.copies:
            own = [v for v in variables if self.owners.get(id(v)) is optimizer]
            if own:
                optimizer.finalize_variable_values(own)


def check_for_tables(accumulate_steps: int, shard_states: bool) -> None:
    """Refuse what treats the gradients or the slots of all variables together.

    Raises:
        ValueError: gradients are accumulated, or slots divided among ranks.
    """
    where = "with tables that have their own optimizer"
    remedy = "leave it out, or make the tables without optimizer="
    if accumulate_steps > 1:
        raise ValueError(describe("accumulate_steps", accumulate_steps, f"1 {where}", remedy))
    if shard_states:
        raise ValueError(describe("shard_states", True, f"False {where}", remedy))
