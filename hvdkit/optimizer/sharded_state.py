"""Sharded optimizer state: each rank keeps 1/N of the slots, updates 1/N of the weights, and gathers the rest.

Stage 1 of Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020. Keras's
optimizer is built over this rank's part of the variables (:class:`hvdkit.optimizer.parts.Parts`), so everything it does
to variables and slots, including weight decay and moving averages, applies to 1/N of them. Gradients are
reduce-scattered before the update, and weights are gathered after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hvdkit import cluster
from hvdkit.collectives.conversion import graph_safe
from hvdkit.errors import HvdkitError, describe
from hvdkit.optimizer.gradients import PlacedGradients
from hvdkit.optimizer.mixins import Combining, check_by_elements
from hvdkit.optimizer.parts import PartProxy, Parts
from hvdkit.sharding.shards import assign_whole, mark


class SharingStates(Combining):
    """Mixin for a Keras optimizer class: Combining, with the slots of replicated variables sharded over ranks."""

    _hvdkit = Combining._hvdkit

    def build(self, variables: Sequence[Any]) -> None:
        """Create this rank's slots of ``variables``."""
        if self.built or cluster.size() == 1:  # type: ignore[attr-defined]
            super().build(variables)
            return
        check_sharing(self)
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                expected = "variables that an update changes by their gradient"
                remedy = "leave shard_states out for models with float8 layers"
                raise ValueError(describe("variables", f"{variable.path} (overwrite_with_gradient)", expected, remedy))
        self._hvdkit_parts = Parts(variables)
        super().build(list(self._hvdkit_parts.listed))
        # Callers expect the trained variables here. Bypass Keras, which would count them as the optimizer's own.
        object.__setattr__(self, "_trainable_variables", list(variables))

    def add_variable_from_reference(self, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        """Create a slot; for a replicated variable, only for this rank's elements."""
        parts = self._hvdkit_parts
        place = None if parts is None else parts.place(reference_variable)
        run = None if place is None else parts.run(place)  # type: ignore[union-attr]
        if run is None:
            return super().add_variable_from_reference(reference_variable, name=name, initializer=initializer)
        assert parts is not None and place is not None
        if name == "gradient_accumulator":  # local gradients are complete until they are reduced
            return super().add_variable_from_reference(parts.variables[place], name=name, initializer=initializer)
        slot = super().add_variable_from_reference(parts.listed[place], name=name, initializer=initializer)
        mark(slot, run)
        return slot

    def _hvdkit_update(self, found: PlacedGradients) -> Any:
        """Update this rank's part of the variables and gather them."""
        if (parts := self._hvdkit_parts) is None or not found.grads:
            return super()._hvdkit_update(found)
        places = self._hvdkit_places(found.variables)
        parts.load()
        result = super()._hvdkit_update(replace(found, variables=[parts.listed[place] for place in places]))
        parts.release()
        for grad, variable, place in zip(found.grads, found.variables, places, strict=True):
            # For variables that this rank updates completely, Keras has already applied the constraint.
            if grad is not None and variable.constraint is not None and isinstance(parts.listed[place], PartProxy):
                variable.assign(variable.constraint(variable))
        return result

    def _check_variables_are_known(self, variables: Sequence[Any]) -> None:
        parts = self._hvdkit_parts
        others = [v for v in variables if parts is None or parts.place(v) is None]
        super()._check_variables_are_known(others)  # type: ignore[misc]

    def _hvdkit_combine(self, prepare: Callable[[], PlacedGradients], loss_scale: Any = None) -> PlacedGradients:
        how = self._hvdkit
        found = how.agreed(prepare, exchanges=not how.reduced)
        if (parts := self._hvdkit_parts) is None:  # single rank, or no variables
            return found.with_grads(how.clip(found.with_grads(how.combine(found)), loss_scale))
        if how.combines:
            found = found.with_grads(parts.combine(found, how.averaging))
        elif not how.reduced:  # combined by the tape: replicated, so the norm needs no exchange
            places = self._hvdkit_places(found.variables)
            whole = replace(found, variables=[parts.variables[place] for place in places])
            return found.with_grads(parts.take(how.clip(whole, loss_scale), places))
        return found.with_grads(how.clip(found, loss_scale, divided=True))

    def _hvdkit_places(self, variables: Sequence[Any]) -> list[int]:
        assert self._hvdkit_parts is not None
        return [place for v in variables if (place := self._hvdkit_parts.place(v)) is not None]

    @graph_safe
    def _backend_update_step(self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any) -> Any:
        super()._backend_update_step(grads, trainable_variables, learning_rate)  # type: ignore[misc]
        if self._hvdkit_parts is not None:
            self._hvdkit_parts.publish(self._hvdkit_places(trainable_variables))

    @graph_safe
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable, if this rank has a part of it."""
        if 0 not in variable.shape:
            super().update_step(gradient, variable, learning_rate)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        super()._apply_weight_decay([v for v in variables if 0 not in v.shape])  # type: ignore[misc]

    def _use_weight_decay(self, variable: Any) -> bool:
        parts = self._hvdkit_parts
        place = None if parts is None else parts.place(variable)
        return super()._use_weight_decay(variable if place is None else parts.variables[place])  # type: ignore

    def _update_model_variables_moving_average(self, trainable_variables: Sequence[Any]) -> None:
        parts = self._hvdkit_parts
        super()._update_model_variables_moving_average(trainable_variables if parts is None else parts.listed)  # type: ignore[misc]

    @graph_safe
    def _overwrite_model_variables_with_average_value(self, trainable_variables: Sequence[Any]) -> None:
        parts = self._hvdkit_parts
        averaged = list(trainable_variables if parts is None else parts.listed)
        super()._overwrite_model_variables_with_average_value(averaged)  # type: ignore[misc]
        if parts is not None:
            parts.publish(range(len(parts.listed)))

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Assign the moving averages to the variables, if enabled. Every rank must call it."""
        parts = self._hvdkit_parts
        if parts is not None and self.use_ema:  # type: ignore[attr-defined]
            parts.load()
        super().finalize_variable_values(var_list)
        if parts is not None:
            parts.release()

    def save_own_variables(self, store: Any) -> None:
        """Save the state; only supported if this rank holds all of it."""
        if self._hvdkit_parts is not None:
            got = f"an optimizer of which rank {cluster.rank()} has 1/{cluster.size()} (shard_states=True)"
            remedy = "save with hk.checkpoint.save or hk.Supervisor, or the model alone with model.export"
            raise HvdkitError(
                describe(
                    "model.save, model.save_weights", got, "an optimizer whose state is whole on each rank", remedy
                )
            )
        super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """Load this rank's part of an unsharded state that Keras saved."""
        if self._hvdkit_parts is None or len(store.keys()) != len(self.variables):
            super().load_own_variables(store)
            return
        for number, variable in enumerate(self.variables):
            assign_whole(variable, store[str(number)])


def check_sharing(optimizer: Any) -> None:
    """Check that an optimizer updates each element independently.

    Raises:
        ValueError: it doesn't.
    """
    if hasattr(optimizer, "optimizers"):
        remedy = "give each of its optimizers its own hk.DistributedOptimizer(..., shard_states=True) and apply"
        raise ValueError(describe("optimizer", "a MultiOptimizer", "one optimizer with shard_states=True", remedy))
    check_by_elements(optimizer, "with shard_states=True")
