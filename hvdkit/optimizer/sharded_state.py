"""Sharded optimizer state: each rank keeps 1/N of the slots, updates 1/N of the weights, and gathers the rest.

Stage 1 of Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020. Keras's
optimizer is built over this rank's part of the variables, an :class:`ElementPartition`, so everything it does to
variables and slots, including weight decay and moving averages, applies to 1/N of them. Gradients are reduce-scattered
before the update, and weights are gathered after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit import cluster
from hvdkit.collectives.conversion import graph_safe
from hvdkit.errors import HvdkitError, describe
from hvdkit.optimizer.average import agree_on, combine
from hvdkit.optimizer.element_partition import ElementPartition, PartProxy
from hvdkit.optimizer.gradients import Gradient, PlacedGradients
from hvdkit.optimizer.mixins import CombiningMixin
from hvdkit.optimizer.optimizer_checks import check_elementwise
from hvdkit.optimizer.row_updates import LearningRate
from hvdkit.optimizer.slots import SlotInitializer
from hvdkit.sharding.shards import AnyVariable, assign_whole, set_holding

if TYPE_CHECKING:
    import keras
    import numpy as np


class ShardedStateMixin(CombiningMixin):
    """Mixin for a Keras optimizer class: combine gradients, and shard the slots of replicated variables over ranks."""

    _hvdkit = CombiningMixin._hvdkit

    def build(self, variables: Sequence[AnyVariable]) -> None:
        """Create this rank's slots of ``variables``."""
        if self.built or cluster.size() == 1:
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

    def add_variable_from_reference(
        self, reference_variable: AnyVariable, name: str | None = None, initializer: SlotInitializer = "zeros"
    ) -> keras.Variable:
        """Create a slot; for a replicated variable, only for this rank's elements."""
        partition = self._hvdkit_partition
        is_whole = name == "gradient_accumulator"  # local gradients are complete until they are reduced
        reference = partition.original_of(reference_variable) if is_whole else partition.target_of(reference_variable)
        slot = super().add_variable_from_reference(reference, name=name, initializer=initializer)
        if not is_whole and (shard := partition.shard(reference)) is not None:
            set_holding(slot, shard)
        return slot

    def _hvdkit_update(self, placed: PlacedGradients) -> object:
        """Update this rank's part of the variables and gather them."""
        partition = self._hvdkit_partition
        variables: list[AnyVariable] = placed.variables
        targets = [partition.target_of(variable) for variable in variables]
        partition.load()
        result = super()._hvdkit_update(replace(placed, variables=targets))
        partition.release()
        for grad, variable, target in zip(placed.grads, variables, targets, strict=True):
            # For variables that this rank updates completely, Keras has already applied the constraint.
            if grad is not None and variable.constraint is not None and isinstance(target, PartProxy):
                variable.assign(variable.constraint(variable))
        return result

    def _check_variables_are_known(self, variables: Sequence[AnyVariable]) -> None:
        others = [v for v in variables if v not in self._hvdkit_partition]
        super()._check_variables_are_known(others)

    def _hvdkit_combine(
        self, prepare: Callable[[], PlacedGradients], loss_scale: float | None = None
    ) -> PlacedGradients:
        reduction = self._hvdkit
        placed = agree_on(prepare, reduction, exchanges=not reduction.reduced)
        if not (partition := self._hvdkit_partition).variables:  # single rank, or no variables
            return reduction.clip(combine(placed, reduction, reduction.call_site), loss_scale)
        if reduction.combines:
            placed = partition.combine(placed, reduction)
        elif not reduction.reduced:  # combined by the tape: replicated, so the norm needs no exchange
            return partition.slice_gradients(reduction.clip(placed, loss_scale))
        return reduction.clip(placed, loss_scale, divided=True)

    @graph_safe
    def _backend_update_step(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[AnyVariable], learning_rate: LearningRate
    ) -> None:
        super()._backend_update_step(grads, trainable_variables, learning_rate)
        self._hvdkit_partition.gather(trainable_variables)

    @graph_safe
    def update_step(self, gradient: Gradient, variable: AnyVariable, learning_rate: LearningRate) -> None:
        """Update one variable, if this rank has a part of it."""
        if 0 not in variable.shape:
            super().update_step(gradient, variable, learning_rate)

    def _apply_weight_decay(self, variables: Sequence[AnyVariable]) -> None:
        super()._apply_weight_decay([v for v in variables if 0 not in v.shape])

    def _var_key(self, variable: AnyVariable) -> object:
        return super()._var_key(self._hvdkit_partition.original_of(variable))

    def _use_weight_decay(self, variable: AnyVariable) -> bool:
        return bool(super()._use_weight_decay(self._hvdkit_partition.original_of(variable)))

    def _is_excluded_from_weight_decay(self, variable: AnyVariable) -> bool:
        # Keras 3.16 calls it in `build`, for the variables that it is built over.
        return bool(super()._is_excluded_from_weight_decay(self._hvdkit_partition.original_of(variable)))

    def _update_model_variables_moving_average(self, trainable_variables: Sequence[AnyVariable]) -> None:
        updated = self._hvdkit_partition.targets or trainable_variables
        super()._update_model_variables_moving_average(updated)

    @graph_safe
    def _overwrite_model_variables_with_average_value(self, trainable_variables: Sequence[AnyVariable]) -> None:
        averaged = list(self._hvdkit_partition.targets or trainable_variables)
        super()._overwrite_model_variables_with_average_value(averaged)
        self._hvdkit_partition.gather(averaged)

    def finalize_variable_values(self, var_list: Sequence[AnyVariable]) -> None:
        """Assign the moving averages to the variables, if enabled. Every rank must call it."""
        if self.use_ema:
            self._hvdkit_partition.load()
        super().finalize_variable_values(var_list)
        self._hvdkit_partition.release()

    def save_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        """Save the state; only supported if this rank holds all of it."""
        if self._hvdkit_partition.variables:
            got = f"an optimizer of which rank {cluster.rank()} has 1/{cluster.size()} (shard_states=True)"
            remedy = "save with hk.checkpoint.save or hk.Supervisor, or the model alone with model.export"
            expected = "an optimizer whose state is whole on each rank"
            raise HvdkitError(describe("model.save, model.save_weights", got, expected, remedy))
        super().save_own_variables(store)

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Load this rank's part of an unsharded state that Keras saved."""
        if not self._hvdkit_partition.variables or len(store.keys()) != len(self.variables):
            super().load_own_variables(store)
            return
        for number, variable in enumerate(self.variables):
            assign_whole(variable, store[str(number)])


def check_shardable(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise ValueError unless an optimizer updates each element independently."""
    if hasattr(optimizer, "optimizers"):
        remedy = "give each of its optimizers its own hk.DistributedOptimizer(..., shard_states=True) and apply"
        raise ValueError(describe("optimizer", "a MultiOptimizer", "one optimizer with shard_states=True", remedy))
    check_elementwise(optimizer, "with shard_states=True")
