"""The mixin that makes a Keras optimizer class distributed.

``fit`` and custom training loops call ``apply`` in every step; the first call builds the optimizer. The methods come in
this order: those of a step, those for slots and the variables that they belong to, moving averages, and files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import allreduce
from hvdkit.collectives.batch_share import within_share
from hvdkit.collectives.call_checks import attempt
from hvdkit.collectives.conversion import graph_safe
from hvdkit.collectives.ops import Min, ReduceOp
from hvdkit.errors import HvdkitError, describe
from hvdkit.optimizer.average import agree_on, scale_to_batch
from hvdkit.optimizer.copies import Original, copy_of, subclass
from hvdkit.optimizer.coupled_layers import check_coupled
from hvdkit.optimizer.element_partition import ElementPartition
from hvdkit.optimizer.equal_ranks import compare_end, compare_start, warn_of_no_callback
from hvdkit.optimizer.gradients import Gradient, PlacedGradients, place_gradients
from hvdkit.optimizer.inner_optimizers import LossScale, keeps_averages, trained_by, updater_of
from hvdkit.optimizer.local_variables import register_local_variables
from hvdkit.optimizer.optimizer_checks import check_inner, check_variables, reject_unsupported, too_late
from hvdkit.optimizer.reduction import Reduction
from hvdkit.optimizer.row_updates import LearningRate, rule_for, update_rows
from hvdkit.optimizer.slots import SlotInitializer, assign_saved, create_slot, reset_reassigned_rows
from hvdkit.optimizer.sparse import sum_duplicates
from hvdkit.optimizer.tables import TableOptimizers, check_table_options
from hvdkit.sharding.shards import AnyVariable, holding_of, inner_variable, is_local, set_holding, shard_of
from hvdkit.sharding.variables import variable_name

if TYPE_CHECKING:
    import numpy as np
    from keras.optimizers import Optimizer as _KerasBase  # the other base of each class that has the mixin
else:
    _KerasBase = object


class DistributedMixin(_KerasBase):
    """What a distributed optimizer adds to its Keras class.

    A LossScaleOptimizer and the optimizer inside it both have it. The outer one combines the gradients while they are
    scaled, so that all ranks see the same overflow and either update or skip; the inner one clips and updates. If
    gradients are accumulated, the inner one combines them, and ranks compare only whether any of them overflowed.

    With ``shard_states``, each rank keeps 1/N of the slots, updates 1/N of the weights and gathers the rest: stage 1 of
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020. Keras's
    optimizer is then built over this rank's part of the variables (``_hvdkit_partition``, else empty), so everything it
    does to variables and slots, including weight decay and moving averages, applies to 1/N of them.
    """

    _hvdkit = Reduction()
    # Wraps a plain optimizer as this one was.
    _hvdkit_wrap: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer] | None = None
    _hvdkit_original: Original | None = None
    _hvdkit_wrapped = False  # whether a LossScaleOptimizer of the user is around this optimizer
    _hvdkit_unscales = True  # whether a LossScaleOptimizer divides the gradients by the scale
    _hvdkit_is_in_fit = False  # whether Keras's train_step has called this optimizer; unknown for a LossScaleOptimizer
    _hvdkit_has_begun = False  # whether the ranks were compared in the first step
    _hvdkit_is_checked = False  # whether hk.fit or a callback checks the current fit
    _hvdkit_starts_equal = False  # whether a Supervisor has made the ranks equal
    _hvdkit_local_keys: frozenset[object] = frozenset()  # keys of local variables at build time
    _hvdkit_updated: Sequence[AnyVariable] = ()  # the variables of the current update
    _hvdkit_has_combined = False  # whether the current step combines the accumulated gradients
    _hvdkit_partition = ElementPartition(())  # with sharded optimizer state, after build
    _hvdkit_tables: TableOptimizers | None = None  # for tables that have their own optimizer
    _hvdkit_trained: Sequence[AnyVariable] = ()  # all variables, if ``_trainable_variables`` lacks such tables
    _hvdkit_is_for_table = False  # whether this is a table's own optimizer

    def __setattr__(self, name: str, value: object) -> None:
        # The constructor of a LossScaleOptimizer (since Keras 3.10) assigns None to the optimizer inside. hvdkit's own
        # one gets another inner optimizer, without options.
        if name == "loss_scale_factor" and value is None and "_hvdkit_wrap" in vars(self):
            object.__setattr__(self, "_hvdkit_wrapped", True)
        super().__setattr__(name, value)

    # A step.

    def scale_loss(self, loss: tf.Tensor | float) -> tf.Tensor | float:
        """Multiply ``loss`` by the scale, if there is one. Keras's ``train_step`` calls it.

        So do loops with a LossScaleOptimizer; with others, they rarely do.
        """
        if isinstance(self, LossScale):
            self._hvdkit_unscales = True
        else:
            self._hvdkit_is_in_fit = True
        return super().scale_loss(loss)

    @graph_safe
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, AnyVariable]]) -> keras.Variable:
        """Call :meth:`apply` with (gradient, variable) pairs; return the number of updates."""
        pairs: list[tuple[Gradient, AnyVariable]] = []

        def collect() -> None:
            pairs.extend((grad, variable) for grad, variable in grads_and_vars)
            if not pairs:
                remedy = "pass zip(grads, variables)"
                raise ValueError(describe("grads_and_vars", "no pair", "a pair for each variable", remedy))

        if (problem := attempt(collect)) is not None:
            agree_on(lambda: _raise(problem), self._hvdkit, exchanges=True)
        return super().apply_gradients(pairs)

    @graph_safe
    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[AnyVariable] | None = None) -> object:
        """Combine ``grads`` over all ranks and update the variables.

        A LossScaleOptimizer skips the update if the gradients of any rank overflowed.
        """
        reduction = self._hvdkit
        reject_unsupported(self._hvdkit_wrapped)
        prepare = partial(self._hvdkit_prepare, grads, trainable_variables)
        if isinstance(self, LossScale):
            return self._hvdkit_apply_scaled(prepare)
        if reduction.accumulate_steps == 1:
            placed = self._hvdkit_combine(prepare, getattr(self, "loss_scale_factor", None))
            if getattr(self, "clipvalue", None) is not None:  # Keras clips values, so sum duplicate rows first
                placed = placed.map(lambda grad, _: sum_duplicates(grad))
            reset_reassigned_rows(placed.grads, placed.variables, all_rows=False)
            return self._hvdkit_update(placed)
        self._hvdkit_has_combined = False
        placed = reduction.divide_rows(prepare())
        reset_reassigned_rows(placed.grads, placed.variables, all_rows=True)
        result = self._hvdkit_update(placed)
        if tf.inside_function() and not self._hvdkit_has_combined:
            raise HvdkitError(
                f"accumulate_steps: Keras {keras.__version__} kept the accumulated gradients; use accumulate_steps=1"
            )
        return result

    def _hvdkit_apply_scaled(self, prepare: Callable[[], PlacedGradients]) -> object:
        """Combine scaled gradients; unless any overflow, unscale them and have the inner optimizer update."""
        inner = updater_of(self)
        placed = agree_on(prepare, self._hvdkit, exchanges=True)
        if not placed.grads:
            return None
        placed = inner._hvdkit_partition.combine(placed, self._hvdkit)
        apply = super().apply if self._hvdkit_unscales else inner.apply
        return apply(placed.grads, placed.variables)

    def _hvdkit_prepare(
        self, grads: Iterable[Gradient], trainable_variables: Iterable[AnyVariable] | None
    ) -> PlacedGradients:
        """Check the arguments of ``apply``, build the optimizer, and scale the gradients to this rank's share.

        All errors before an exchange are raised here. The first step also checks what does not need the model, unless
        hk.fit or a callback checks the fit.
        """
        if trainable_variables is None and not self.built:
            expected = "variables, because the optimizer is not built yet"
            remedy = "pass them, or call optimizer.build first"
            raise ValueError(describe("trainable_variables", None, expected, remedy))
        variables = list(trained_by(self) if trainable_variables is None else trainable_variables)
        grads = list(grads) if isinstance(grads, Iterator) else grads
        if isinstance(grads, (list, tuple)) and not grads:  # Keras treats this as a step without an update
            variables = []
        placed = place_gradients(grads, variables)
        if not self.built:
            is_multi = hasattr(self, "optimizers")  # MultiOptimizer doesn't create a name scope
            with contextlib.nullcontext() if is_multi else keras.name_scope(self.name, caller=self):
                self.build(variables)
        self._check_variables_are_known(variables)
        for variable, kind in zip(variables, placed.kinds, strict=True):
            if kind == "local" and self._var_key(variable) not in updater_of(self)._hvdkit_local_keys:
                raise ValueError(too_late(variable_name(variable)))
        if not (self._hvdkit_has_begun or within_share()):
            check_coupled(variables)
            if not self._hvdkit_is_checked:
                self._hvdkit_has_begun = True
                if not self._hvdkit_starts_equal:
                    compare_start(self, variables, is_fit=self._hvdkit_is_in_fit)
        return scale_to_batch(placed, self._hvdkit)

    def _hvdkit_combine(
        self, prepare: Callable[[], PlacedGradients], loss_scale: float | None = None
    ) -> PlacedGradients:
        """Return the combined and clipped gradients, with their variables."""
        reduction = self._hvdkit
        exchanges = not reduction.reduced and (reduction.shard_states or reduction.clip_global_norm is not None)
        placed = agree_on(prepare, reduction, exchanges=exchanges)
        partition = self._hvdkit_partition
        if not (reduction.combines or reduction.reduced):  # combined by the caller: replicated ones are whole
            return partition.slice_gradients(reduction.clip(placed, loss_scale))
        return reduction.clip(partition.combine(placed, reduction), loss_scale, divided=bool(partition.variables))

    def _hvdkit_update(self, placed: PlacedGradients) -> object:
        """Update this rank's part of the variables, and a table with its own optimizer by that one."""
        partition = self._hvdkit_partition
        grads = placed.grads
        variables = placed.variables
        if self._hvdkit_tables is not None:
            grads, variables = self._hvdkit_tables.apply(grads, variables)
            if not grads:  # Keras would not count the step
                self._iterations.assign_add(1)
                return None
        with partition.loaded():
            result = super().apply(grads, [partition.target_of(variable) for variable in variables])
        partition.constrain(variables, grads)
        return result

    def _backend_apply_gradients(self, grads: Sequence[Gradient], trainable_variables: Sequence[AnyVariable]) -> object:
        # Bypass Keras's tracking, which would count these among the optimizer's own variables.
        object.__setattr__(self, "_hvdkit_updated", list(trainable_variables))
        return super()._backend_apply_gradients(grads, trainable_variables)

    @graph_safe
    def _clip_gradients(self, grads: Sequence[tf.Tensor | tf.IndexedSlices]) -> object:
        # Keras clips once per update, after averaging the accumulated gradients over the steps.
        reduction = self._hvdkit
        if reduction.accumulate_steps > 1:
            self._hvdkit_has_combined = True
            factor = float(reduction.accumulate_steps)
            summed = [g * factor for g in grads] if reduction.op == ReduceOp.Sum else grads

            def prepare() -> PlacedGradients:
                return reduction.divide_rows(place_gradients(summed, self._hvdkit_updated), undo=True)

            grads = self._hvdkit_combine(prepare).grads
        return super()._clip_gradients(grads)

    @graph_safe
    def _backend_update_step(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[AnyVariable], learning_rate: LearningRate
    ) -> None:
        super()._backend_update_step(grads, trainable_variables, learning_rate)
        self._hvdkit_partition.gather(trainable_variables)

    @graph_safe
    def update_step(self, gradient: Gradient, variable: AnyVariable, learning_rate: LearningRate) -> None:
        """Update one variable; for a shard only the rows in the gradient, if the optimizer supports it."""
        shard = shard_of(variable)
        is_part = shard is not None or variable in self._hvdkit_partition
        if is_part and 0 in variable.shape:  # this rank has none of it, and Keras's ops do not support such shapes
            return
        if shard is None:
            super().update_step(gradient, variable, learning_rate)
            return
        rule = rule_for(self, self._hvdkit.sparse_updates)
        with tf.device(inner_variable(variable).device):  # the CPU for tables in host memory
            if rule is not None:
                update_rows(rule, self, variable, shard, gradient, learning_rate)
                return
            # Keras assumes distinct rows.
            super().update_step(sum_duplicates(gradient), variable, learning_rate)

    @graph_safe
    def check_finite(self, grads: Sequence[Gradient]) -> tf.Tensor:
        """Return True if the gradients of all ranks are finite: a LossScaleOptimizer asks before it updates."""
        present = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in present])
        is_replicated = self._hvdkit.combines and not self._hvdkit.shard_states
        is_replicated = is_replicated and not any(holding_of(v) is not None for v in self._trainable_variables)
        return finite if is_replicated else allreduce(finite, Min, process_set=self._hvdkit.group)

    # Slots, and the variables that they belong to.

    def build(self, variables: Sequence[AnyVariable]) -> None:
        """Create the slots of ``variables``; with sharded states, those of this rank's elements."""
        if self._hvdkit_wrapped:  # raise on every rank: one that overflows in the first step does not call apply
            reject_unsupported(wrapped=True)
        if self.built:
            return
        if isinstance(self, LossScale):
            super().build(variables)
            return
        check_variables(self, variables)
        targets = list(variables)
        if self._hvdkit.shard_states and cluster.size() > 1:
            self._hvdkit_partition = ElementPartition(variables)
            targets = list(self._hvdkit_partition.targets)
        for variable in targets:
            # Also registers the inner TensorFlow variable, which may have been created later.
            if (holding := holding_of(variable)) is not None:
                set_holding(variable, holding)
        self._hvdkit_local_keys = frozenset(self._var_key(v) for v in targets if is_local(v))
        tables = None if self._hvdkit_is_for_table else TableOptimizers.of(targets, self._hvdkit_copy_for_table)
        super().build(targets if tables is None else tables.without_tables(targets))
        check_inner(self)
        # Bypass Keras's tracking, which would count these variables and the tables' slots as this optimizer's own.
        if self._hvdkit_partition.variables:  # callers expect whole variables
            object.__setattr__(self, "_trainable_variables", list(variables))
        if tables is not None:
            object.__setattr__(self, "_hvdkit_tables", tables)
            object.__setattr__(self, "_hvdkit_trained", list(variables))

    def _hvdkit_copy_for_table(self, optimizer: keras.optimizers.Optimizer) -> DistributedMixin:
        """Return a copy of a table's optimizer, to be called with gradients that are already combined."""
        reduction = self._hvdkit
        check_table_options(reduction.accumulate_steps, reduction.shard_states)
        with tf.init_scope():  # Keras builds inside the training step's graph, which cannot read the learning rate
            copy = copy_of(optimizer, subclass(DistributedMixin, type(optimizer)))
        copy._hvdkit = replace(reduction, combines=False, clip_global_norm=None)
        copy._hvdkit_is_for_table = True
        copy._hvdkit_has_begun = True  # the model's optimizer compares the ranks
        copy.loss_scale_factor = self.loss_scale_factor
        return copy

    def add_variable_from_reference(
        self, reference_variable: AnyVariable, name: str | None = None, initializer: SlotInitializer = "zeros"
    ) -> keras.Variable:
        """Create a slot, sharded or local like its variable; with sharded states, only for this rank's elements."""
        partition = self._hvdkit_partition
        create = super().add_variable_from_reference
        if name == "gradient_accumulator":  # local gradients are complete until they are reduced
            return create_slot(create, partition.original_of(reference_variable), name, initializer)
        reference = partition.target_of(reference_variable)
        slot = create_slot(create, reference, name, initializer)
        if (shard := partition.shard(reference)) is not None:
            set_holding(slot, shard)
        return slot

    def register_local_var(self, variable: AnyVariable) -> None:
        """Make ``variable`` local, as :func:`hvdkit.register_local_variables` does.

        Raises:
            ValueError: the optimizer is already built, or ``variable`` is sharded.
            TypeError: ``variable`` is not a variable.
        """
        if self.built:
            raise ValueError(too_late(variable_name(variable)))
        register_local_variables([variable])

    @property
    def variables(self) -> list[keras.Variable]:
        """The slots and counters, including those of tables with their own optimizer."""
        optimizers = () if self._hvdkit_tables is None else self._hvdkit_tables.optimizers
        return [*super().variables, *(v for optimizer in optimizers for v in optimizer.variables)]

    def _check_variables_are_known(self, variables: Sequence[AnyVariable]) -> None:
        others = self._hvdkit_without_tables(variables)
        if self._hvdkit_partition.variables:
            others = [v for v in others if v not in self._hvdkit_partition]
        super()._check_variables_are_known(others)

    def _hvdkit_without_tables(self, variables: Sequence[AnyVariable]) -> Sequence[AnyVariable]:
        """Return those of ``variables`` that do not have their own optimizer."""
        return variables if self._hvdkit_tables is None else self._hvdkit_tables.without_tables(variables)

    def _var_key(self, variable: AnyVariable) -> object:
        return super()._var_key(self._hvdkit_partition.original_of(variable))

    def _use_weight_decay(self, variable: AnyVariable) -> bool:
        return bool(super()._use_weight_decay(self._hvdkit_partition.original_of(variable)))

    def _is_excluded_from_weight_decay(self, variable: AnyVariable) -> bool:
        # Keras 3.16 calls it in `build`, for the variables that it is built over.
        return bool(super()._is_excluded_from_weight_decay(self._hvdkit_partition.original_of(variable)))

    def _apply_weight_decay(self, variables: Sequence[AnyVariable]) -> None:
        if self._hvdkit_partition.variables:
            variables = [v for v in variables if 0 not in v.shape]
        super()._apply_weight_decay(variables)

    # Moving averages of the weights, and the end of fit.

    def _update_model_variables_moving_average(self, trainable_variables: Sequence[AnyVariable]) -> None:
        super()._update_model_variables_moving_average(self._hvdkit_partition.targets or trainable_variables)

    @graph_safe
    def _overwrite_model_variables_with_average_value(self, trainable_variables: Sequence[AnyVariable]) -> None:
        averaged = list(self._hvdkit_partition.targets or trainable_variables)
        super()._overwrite_model_variables_with_average_value(averaged)
        self._hvdkit_partition.gather(averaged)

    def finalize_variable_values(self, var_list: Sequence[AnyVariable]) -> None:
        """Assign the moving averages to the variables, if enabled. Keras calls this at the end of ``fit``.

        Every rank must call it.
        """
        trained = list(var_list)
        if self._hvdkit_tables is not None:
            self._hvdkit_tables.finalize(trained)
        with self._hvdkit_partition.loaded():
            super().finalize_variable_values(self._hvdkit_without_tables(trained))
        if isinstance(self, LossScale) or self._hvdkit_is_checked or self._hvdkit_is_for_table:
            return
        is_fit = self._hvdkit_is_in_fit or not keeps_averages(self)  # a loop calls it for EMA
        if is_fit and int(self.iterations.numpy()) > 0:  # fit may end without an epoch
            warn_of_no_callback()
            compare_end(trained, self._hvdkit.group)

    # Files and pickles.

    def save_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        """Save the state, unless this rank holds 1/N of it (``shard_states``)."""
        if updater_of(self)._hvdkit_partition.variables:
            got = f"an optimizer of which rank {cluster.rank()} has 1/{cluster.size()} (shard_states=True)"
            remedy = "save with hk.checkpoint.save or hk.Supervisor, or the model alone with model.export"
            expected = "an optimizer whose state is whole on each rank"
            raise HvdkitError(describe("model.save, model.save_weights", got, expected, remedy))
        super().save_own_variables(store)

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Load the state that Keras saved, which is whole; of sharded slots, only this rank's part.

        Raises:
            ValueError: a variable holds several tables, or one of another shape than the saved one.
        """
        is_sharded = any(holding_of(v) is not None for v in self.variables)
        if not is_sharded or len(store.keys()) != len(self.variables):  # the latter is reported by Keras
            super().load_own_variables(store)
            return
        for number, variable in enumerate(self.variables):
            assign_saved(variable, store[str(number)])

    def __reduce__(self) -> tuple[object, ...]:
        # Keras restores a plain optimizer from its config; wrap it again.
        unpickle, arguments, *_ = tuple(super().__reduce__())
        plain = getattr(keras.optimizers.Optimizer, unpickle.__name__)
        return restore_optimizer, (plain, arguments, self._hvdkit_wrap, self._hvdkit_unscales)

    def stateless_apply(self, *_: object, **__: object) -> NoReturn:
        """Raise: like Keras on TensorFlow, stateless updates are not supported."""
        remedy = "call optimizer.apply(grads, variables)"
        raise ValueError(describe("stateless_apply", "a call", "apply, which updates TensorFlow variables", remedy))


def restore_optimizer(
    unpickle: Callable[..., keras.optimizers.Optimizer],
    arguments: tuple[object, ...],
    wrap: Callable[[keras.optimizers.Optimizer], DistributedMixin],
    unscales: bool,
) -> keras.optimizers.Optimizer:
    """Unpickle a distributed optimizer."""
    optimizer = wrap(unpickle(*arguments))
    optimizer._hvdkit_unscales = unscales
    return optimizer


def ranks_of(optimizer: keras.optimizers.Optimizer | None) -> cluster.Group | None:
    """Return the ranks over which an optimizer combines gradients; None for all ranks or a plain optimizer."""
    return optimizer._hvdkit.group if isinstance(optimizer, DistributedMixin) else None


def _raise(problem: Exception) -> NoReturn:
    raise problem
