"""Sharded optimizer state: each rank keeps 1/N of the slots, updates 1/N of the weights, and gathers the rest.

Stage 1 of Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020. Keras's
optimizer is built over this rank's part of the variables, an :class:`ElementPartition`, so everything it does to
variables and slots, including weight decay and moving averages, applies to 1/N of them. Gradients are reduce-scattered
before the update, and weights are gathered after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hvdkit import cluster
from hvdkit.collectives.conversion import graph_safe
from hvdkit.errors import HvdkitError, describe
from hvdkit.optimizer.element_partition import ElementPartition, PartProxy
from hvdkit.optimizer.gradients import PlacedGradients
from hvdkit.optimizer.mixins import CombiningMixin, check_elementwise
from hvdkit.sharding.shards import assign_whole, set_holding


class ShardedStateMixin(CombiningMixin):
    """Mixin for a Keras optimizer class: combine gradients, and shard the slots of replicated variables over ranks."""

    _hvdkit = CombiningMixin._hvdkit

    def build(self, variables: Sequence[Any]) -> None:
        """Create this rank's slots of ``variables``."""
        if self.built or cluster.size() == 1:  # type: ignore[attr-defined]
            super().build(variables)
            return
        check_shardable(self)
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                expected = "variables that an update changes by their gradient"
                remedy = "leave shard_states out for models with float8 layers"
                raise ValueError(describe("variables", f"{variable.path} (overwrite_with_gradient)", expected, remedy))
        self._hvdkit_partition = ElementPartition(variables)
        super().build(list(self._hvdkit_partition.targets))
        # Callers expect the trained variables here. Bypass Keras, which would count them as the optimizer's own.
        object.__setattr__(self, "_trainable_variables", list(variables))

    def add_variable_from_reference(self, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        """Create a slot; for a replicated variable, only for this rank's elements."""
        partition = self._hvdkit_partition
        index = None if partition is None else partition.index_of(reference_variable)
        shard = None if index is None else partition.shard(index)  # type: ignore[union-attr]
        if shard is None:
            return super().add_variable_from_reference(reference_variable, name=name, initializer=initializer)
        assert partition is not None and index is not None
        if name == "gradient_accumulator":  # local gradients are complete until they are reduced
            return super().add_variable_from_reference(partition.variables[index], name=name, initializer=initializer)
        slot = super().add_variable_from_reference(partition.targets[index], name=name, initializer=initializer)
        set_holding(slot, shard)
        return slot

    def _hvdkit_update(self, placed: PlacedGradients) -> Any:
        """Update this rank's part of the variables and gather them."""
        if (partition := self._hvdkit_partition) is None or not placed.grads:
            return super()._hvdkit_update(placed)
        indices = self._hvdkit_indices(placed.variables)
        partition.load()
        result = super()._hvdkit_update(replace(placed, variables=[partition.targets[index] for index in indices]))
        partition.release()
        for grad, variable, index in zip(placed.grads, placed.variables, indices, strict=True):
            # For variables that this rank updates completely, Keras has already applied the constraint.
            if grad is not None and variable.constraint is not None and isinstance(partition.targets[index], PartProxy):
                variable.assign(variable.constraint(variable))
        return result

    def _check_variables_are_known(self, variables: Sequence[Any]) -> None:
        partition = self._hvdkit_partition
        others = [v for v in variables if partition is None or partition.index_of(v) is None]
        super()._check_variables_are_known(others)  # type: ignore[misc]

    def _hvdkit_combine(self, prepare: Callable[[], PlacedGradients], loss_scale: Any = None) -> PlacedGradients:
        reduction = self._hvdkit
        placed = reduction.agree(prepare, exchanges=not reduction.reduced)
        if (partition := self._hvdkit_partition) is None:  # single rank, or no variables
            return placed.with_grads(reduction.clip(placed.with_grads(reduction.combine(placed)), loss_scale))
        if reduction.combines:
            placed = placed.with_grads(partition.combine(placed, reduction))
        elif not reduction.reduced:  # combined by the tape: replicated, so the norm needs no exchange
            indices = self._hvdkit_indices(placed.variables)
            whole = replace(placed, variables=[partition.variables[index] for index in indices])
            return placed.with_grads(partition.slice_gradients(reduction.clip(whole, loss_scale), indices))
        return placed.with_grads(reduction.clip(placed, loss_scale, divided=True))

    def _hvdkit_indices(self, variables: Sequence[Any]) -> list[int]:
        assert self._hvdkit_partition is not None
        return [index for v in variables if (index := self._hvdkit_partition.index_of(v)) is not None]

    @graph_safe
    def _backend_update_step(self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any) -> Any:
        super()._backend_update_step(grads, trainable_variables, learning_rate)  # type: ignore[misc]
        if self._hvdkit_partition is not None:
            self._hvdkit_partition.gather(self._hvdkit_indices(trainable_variables))

    @graph_safe
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable, if this rank has a part of it."""
        if 0 not in variable.shape:
            super().update_step(gradient, variable, learning_rate)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        super()._apply_weight_decay([v for v in variables if 0 not in v.shape])  # type: ignore[misc]

    def _use_weight_decay(self, variable: Any) -> bool:
        partition = self._hvdkit_partition
        index = None if partition is None else partition.index_of(variable)
        return super()._use_weight_decay(variable if index is None else partition.variables[index])  # type: ignore

    def _update_model_variables_moving_average(self, trainable_variables: Sequence[Any]) -> None:
        partition = self._hvdkit_partition
        super()._update_model_variables_moving_average(trainable_variables if partition is None else partition.targets)  # type: ignore[misc]

    @graph_safe
    def _overwrite_model_variables_with_average_value(self, trainable_variables: Sequence[Any]) -> None:
        partition = self._hvdkit_partition
        averaged = list(trainable_variables if partition is None else partition.targets)
        super()._overwrite_model_variables_with_average_value(averaged)  # type: ignore[misc]
        if partition is not None:
            partition.gather(range(len(partition.targets)))

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Assign the moving averages to the variables, if enabled. Every rank must call it."""
        partition = self._hvdkit_partition
        if partition is not None and self.use_ema:  # type: ignore[attr-defined]
            partition.load()
        super().finalize_variable_values(var_list)
        if partition is not None:
            partition.release()

    def save_own_variables(self, store: Any) -> None:
        """Save the state; only supported if this rank holds all of it."""
        if self._hvdkit_partition is not None:
            got = f"an optimizer of which rank {cluster.rank()} has 1/{cluster.size()} (shard_states=True)"
            remedy = "save with hk.checkpoint.save or hk.Supervisor, or the model alone with model.export"
            expected = "an optimizer whose state is whole on each rank"
            raise HvdkitError(describe("model.save, model.save_weights", got, expected, remedy))
        super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """Load this rank's part of an unsharded state that Keras saved."""
        if self._hvdkit_partition is None or len(store.keys()) != len(self.variables):
            super().load_own_variables(store)
            return
        for number, variable in enumerate(self.variables):
            assign_whole(variable, store[str(number)])


def check_shardable(optimizer: Any) -> None:
    """Check that an optimizer updates each element independently.

    Raises:
        ValueError: it doesn't.
    """
    if hasattr(optimizer, "optimizers"):
        remedy = "give each of its optimizers its own hk.DistributedOptimizer(..., shard_states=True) and apply"
        raise ValueError(describe("optimizer", "a MultiOptimizer", "one optimizer with shard_states=True", remedy))
    check_elementwise(optimizer, "with shard_states=True")
