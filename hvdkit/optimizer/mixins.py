"""Mixins for Keras optimizer classes: combine gradients over ranks, and update shards by row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from hvdkit.optimizer.average import agree_on, combine, scale_to_batch
from hvdkit.optimizer.copies import Original, copy_of, subclass
from hvdkit.optimizer.coupled_layers import check_coupled
from hvdkit.optimizer.element_partition import ElementPartition
from hvdkit.optimizer.equal_ranks import compare_end, compare_start, warn_of_no_callback
from hvdkit.optimizer.gradients import Gradient, PlacedGradients, place_gradients
from hvdkit.optimizer.local_variables import register_local_variables
from hvdkit.optimizer.optimizer_checks import (
    check_elementwise,
    check_for_parts,
    check_norms,
    check_overwritten,
    reject_unsupported,
    too_late,
)
from hvdkit.optimizer.reduction import Reduction
from hvdkit.optimizer.row_updates import LearningRate, rule_for, update_rows
from hvdkit.optimizer.slots import SlotInitializer, initialize_slot, register_slot, reset_reassigned_rows
from hvdkit.optimizer.sparse import sum_duplicates
from hvdkit.optimizer.tables import TableOptimizers, check_table_options
from hvdkit.sharding.shards import (
    AnyVariable,
    Local,
    holding_of,
    inner_variable,
    is_local,
    piece_states,
    set_holding,
    shard_of,
    variable_optimizer,
)
from hvdkit.sharding.variables import variable_name

if TYPE_CHECKING:
    import numpy as np
    from keras.optimizers import Optimizer as _KerasBase  # the other base of each class that has a mixin
else:
    _KerasBase = object
LossScale = keras.optimizers.LossScaleOptimizer


class DistributedMixin(_KerasBase):
    """Methods that all distributed optimizers add to Keras's."""

    _hvdkit: Reduction
    # Wraps a plain optimizer as this one was.
    _hvdkit_wrap: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer] | None = None
    _hvdkit_original: Original | None = None
    _hvdkit_scales_loss = False  # whether Keras's own train_step has called this optimizer
    _hvdkit_has_begun = False  # whether the ranks were compared in the first step
    _hvdkit_is_checked = False  # whether hk.fit or a callback checks the current fit
    _hvdkit_starts_equal = False  # whether a Supervisor has made the ranks equal

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
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        grads = list(grads) if isinstance(grads, Iterator) else grads
        if isinstance(grads, (list, tuple)) and not grads:  # Keras treats this as a step without an update
            variables = []
        placed = place_gradients(grads, variables)
        if not self.built:
            is_multi = hasattr(self, "optimizers")  # MultiOptimizer doesn't create a name scope
            with contextlib.nullcontext() if is_multi else keras.name_scope(self.name, caller=self):
                self.build(variables)
        tables = getattr(self, "_hvdkit_tables", None)
        self._check_variables_are_known(variables if tables is None else tables.without_tables(variables))
        inner: keras.optimizers.Optimizer = getattr(self, "inner_optimizer", self)
        for variable, kind in zip(variables, placed.kinds, strict=True):
            if kind == "local" and self._var_key(variable) not in inner._hvdkit_local_keys:
                raise ValueError(too_late(variable_name(variable)))
        if not (self._hvdkit_has_begun or within_share()):
            check_coupled(variables)
            if not self._hvdkit_is_checked:
                self._hvdkit_has_begun = True
                if not self._hvdkit_starts_equal:
                    compare_start(self, variables, is_fit=self._hvdkit_scales_loss)
        return scale_to_batch(placed, self._hvdkit)

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

    def __reduce__(self) -> tuple[object, ...]:
        # Keras restores a plain optimizer from its config; wrap it again.
        unpickle, arguments, *_ = tuple(super().__reduce__())
        plain = getattr(keras.optimizers.Optimizer, unpickle.__name__)
        return restore_optimizer, (plain, arguments, self._hvdkit_wrap, getattr(self, "_scaled", True))

    def stateless_apply(self, *_: object, **__: object) -> NoReturn:
        """Raise: like Keras on TensorFlow, stateless updates are not supported."""
        remedy = "call optimizer.apply(grads, variables)"
        raise ValueError(describe("stateless_apply", "a call", "apply, which updates TensorFlow variables", remedy))

    def register_local_var(self, variable: AnyVariable) -> None:
        """Make ``variable`` local, as :func:`hvdkit.register_local_variables` does.

        Raises:
            ValueError: the optimizer is already built, or ``variable`` is sharded.
            TypeError: ``variable`` is not a variable.
        """
        if self.built:
            raise ValueError(too_late(variable_name(variable)))
        register_local_variables([variable])


def restore_optimizer(
    unpickle: Callable[..., keras.optimizers.Optimizer],
    arguments: tuple[object, ...],
    wrap: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer],
    scaled: bool,
) -> keras.optimizers.Optimizer:
    """Unpickle a distributed optimizer."""
    optimizer = wrap(unpickle(*arguments))
    if isinstance(optimizer, LossScaleMixin):
        optimizer._scaled = scaled
    return optimizer


class CombiningMixin(DistributedMixin):
    """Mixin for a Keras optimizer class: combine gradients over ranks before the class's own update."""

    _hvdkit = Reduction()
    _hvdkit_wrapped = False  # whether a LossScaleOptimizer is around this optimizer
    _hvdkit_local_keys: frozenset[object] = frozenset()  # keys of local variables at build time
    _hvdkit_updated: Sequence[AnyVariable] = ()  # the variables of the current update
    _hvdkit_partition = ElementPartition(())  # with sharded optimizer state, after build
    _hvdkit_tables: TableOptimizers | None = None  # for tables that have their own optimizer
    _hvdkit_is_for_table = False  # whether this is a table's own optimizer

    def __setattr__(self, name: str, value: object) -> None:
        # The constructor of a LossScaleOptimizer (since Keras 3.10) assigns None to the optimizer inside. hvdkit's own
        # one gets another inner optimizer, without options.
        if name == "loss_scale_factor" and value is None and "_hvdkit_wrap" in vars(self):
            object.__setattr__(self, "_hvdkit_wrapped", True)
        super().__setattr__(name, value)

    def scale_loss(self, loss: tf.Tensor | float) -> tf.Tensor | float:
        """Multiply ``loss`` by the scale, if there is one. Keras's own ``train_step`` calls this; loops rarely do."""
        self._hvdkit_scales_loss = True
        return super().scale_loss(loss)

    def build(self, variables: Sequence[AnyVariable]) -> None:
        """Create the slots of ``variables``."""
        if self._hvdkit_wrapped:  # raise on every rank: one that overflows in the first step does not call apply
            reject_unsupported(wrapped=True)
        if self.built:
            return
        for variable in variables:
            if (holding := holding_of(variable)) is None:
                continue
            if isinstance(holding, Local):
                check_norms(self, ("global_clipnorm",), "with local variables")  # all updates would differ by rank
                check_for_parts(self)
            elif self._hvdkit_is_for_table or variable_optimizer(variable) is None:
                check_elementwise(self, "with sharded variables")
                check_for_parts(self)
            # Also registers the inner TensorFlow variable, which may have been created later.
            set_holding(variable, holding)
        check_overwritten(self, variables)
        self._hvdkit_local_keys = frozenset(self._var_key(v) for v in variables if is_local(v))
        tables = None if self._hvdkit_is_for_table else TableOptimizers.of(variables, self._hvdkit_copy_for_table)
        super().build(variables if tables is None else tables.without_tables(variables))
        check_inner(self)
        if tables is not None:
            # Bypass Keras's tracking, which would count the tables among this optimizer's variables.
            object.__setattr__(self, "_hvdkit_tables", tables)
            object.__setattr__(self, "_trainable_variables", list(variables))

    def _hvdkit_copy_for_table(self, optimizer: keras.optimizers.Optimizer) -> CombiningMixin:
        """Return a copy of a table's optimizer, to be called with gradients that are already combined."""
        reduction = self._hvdkit
        check_table_options(reduction.accumulate_steps, reduction.shard_states)
        with tf.init_scope():  # Keras builds inside the training step's graph, which cannot read the learning rate
            copy = copy_of(optimizer, subclass(CombiningMixin, type(optimizer)))
        copy._hvdkit = replace(reduction, combines=False, clip_global_norm=None)
        copy._hvdkit_is_for_table = True
        copy._hvdkit_has_begun = True  # the model's optimizer compares the ranks
        copy.loss_scale_factor = self.loss_scale_factor
        return copy

    @property
    def variables(self) -> list[keras.Variable]:
        """The slots and counters, including those of tables with their own optimizer."""
        optimizers = () if self._hvdkit_tables is None else self._hvdkit_tables.optimizers
        return [*super().variables, *(v for optimizer in optimizers for v in optimizer.variables)]

    def finalize_variable_values(self, var_list: Sequence[AnyVariable]) -> None:
        """Assign the moving averages to the variables, if enabled; Keras calls this at the end of ``fit``."""
        trained = list(var_list)
        if self._hvdkit_tables is not None:
            self._hvdkit_tables.finalize(var_list)
            var_list = self._hvdkit_tables.without_tables(var_list)
        super().finalize_variable_values(var_list)
        if self._hvdkit_is_checked or self._hvdkit_is_for_table:
            return
        is_fit = self._hvdkit_scales_loss or not self.use_ema  # a loop calls it for EMA
        if is_fit and int(self.iterations.numpy()) > 0:  # fit may end without an epoch
            warn_of_no_callback()
            compare_end(trained, self._hvdkit.group)

    def add_variable_from_reference(
        self, reference_variable: AnyVariable, name: str | None = None, initializer: SlotInitializer = "zeros"
    ) -> keras.Variable:
        """Create a slot, sharded or local like its variable."""
        shard = shard_of(reference_variable)
        inner = getattr(reference_variable, "_value", None)
        # The slots of a table in host memory are also in host memory.
        device = tf.device(inner.device) if isinstance(inner, tf.Variable) else contextlib.nullcontext()
        # In a step that is being traced, TensorFlow would initialize the slot later and lose what is assigned here.
        created = contextlib.nullcontext() if shard is None else tf.init_scope()
        with created, device:
            first = initializer if shard is None else "zeros"
            slot = super().add_variable_from_reference(reference_variable, name=name, initializer=first)
        if is_local(reference_variable):
            set_holding(slot, Local())
        if shard is not None:
            initialize_slot(slot, initializer)
            set_holding(slot, shard.of_slot(name or "var"))
            if shard.usage is not None:
                register_slot(reference_variable, name or "", slot, initializer)
        return slot

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Load the state that Keras saved; for slots of sharded variables only this rank's shard.

        Raises:
            ValueError: a variable's tables were not saved separately.
        """
        if len(store.keys()) != len(self.variables) or not any(map(shard_of, self.variables)):
            super().load_own_variables(store)
            return
        for number, variable in enumerate(self.variables):
            whole = store[str(number)]
            parts = piece_states(variable)
            if not parts:
                variable.assign(whole)
                continue
            if len(parts) > 1 or tuple(whole.shape) != tuple(parts[0].shape):
                got = f"slots {list(whole.shape)} of {[part.name for part in parts]}"
                remedy = "pass compile=False and compile again, or continue from a hk.Supervisor's checkpoint"
                raise ValueError(describe("optimizer", got, "slots of one whole table", remedy))
            parts[0].assign_local(whole[tuple(slice(i.start, i.stop, i.step) for i in parts[0].local_index)])

    @graph_safe
    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[AnyVariable] | None = None) -> object:
        """Combine ``grads`` over all ranks and update the variables."""
        reduction = self._hvdkit
        reject_unsupported(self._hvdkit_wrapped)
        prepare = partial(self._hvdkit_prepare, grads, trainable_variables)
        if reduction.accumulate_steps == 1:
            scale = getattr(self, "loss_scale_factor", None)
            placed = self._hvdkit_combine(prepare, scale)
            if getattr(self, "clipvalue", None) is not None:  # Keras clips values, so sum duplicate rows first
                placed = placed.map(lambda grad, _: sum_duplicates(grad))
            reset_reassigned_rows(placed.grads, placed.variables, all_rows=False)
            return self._hvdkit_update(placed)
        self._hvdkit_combined = False
        placed = reduction.divide_rows(prepare())
        reset_reassigned_rows(placed.grads, placed.variables, all_rows=True)
        result = self._hvdkit_update(placed)
        if tf.inside_function() and not self._hvdkit_combined:
            raise HvdkitError(
                f"accumulate_steps: Keras {keras.__version__} kept the accumulated gradients; use accumulate_steps=1"
            )
        return result

    def _hvdkit_combine(
        self, prepare: Callable[[], PlacedGradients], loss_scale: float | None = None
    ) -> PlacedGradients:
        """Return the combined and clipped gradients, with their variables."""
        reduction = self._hvdkit
        clips = reduction.clip_global_norm is not None and not reduction.reduced
        placed = agree_on(prepare, reduction, exchanges=clips)
        return reduction.clip(combine(placed, reduction, reduction.call_site), loss_scale)

    def _hvdkit_update(self, placed: PlacedGradients) -> object:
        """Update the variables, using a table's own optimizer if it has one."""
        grads = placed.grads
        variables = placed.variables
        if self._hvdkit_tables is not None:
            grads, variables = self._hvdkit_tables.apply(grads, variables)
            if not grads:  # Keras would not count the step
                self._iterations.assign_add(1)
                return None
        return super().apply(grads, variables)

    def _backend_apply_gradients(self, grads: Sequence[Gradient], trainable_variables: Sequence[AnyVariable]) -> object:
        # Bypass Keras's tracking, which would count these among the optimizer's own variables.
        object.__setattr__(self, "_hvdkit_updated", list(trainable_variables))
        return super()._backend_apply_gradients(grads, trainable_variables)

    @graph_safe
    def _clip_gradients(self, grads: Sequence[tf.Tensor | tf.IndexedSlices]) -> object:
        # Keras clips once per update, after averaging the accumulated gradients over the steps.
        reduction = self._hvdkit
        if reduction.accumulate_steps > 1:
            self._hvdkit_combined = True
            factor = float(reduction.accumulate_steps)
            summed = [g * factor for g in grads] if reduction.op == ReduceOp.Sum else grads

            def prepare() -> PlacedGradients:
                return reduction.divide_rows(place_gradients(summed, self._hvdkit_updated), undo=True)

            grads = self._hvdkit_combine(prepare).grads
        return super()._clip_gradients(grads)

    @graph_safe
    def update_step(self, gradient: Gradient, variable: AnyVariable, learning_rate: LearningRate) -> None:
        """Update one variable; for a shard only the rows in the gradient, if the optimizer supports it."""
        if (shard := shard_of(variable)) is None:
            super().update_step(gradient, variable, learning_rate)
            return
        if 0 in variable.shape:  # empty shard, which Keras's ops do not support
            return
        rule = rule_for(self, self._hvdkit.sparse_updates)
        with tf.device(inner_variable(variable).device):  # the CPU for tables in host memory
            if rule is not None:
                update_rows(rule, self, variable, shard, gradient, learning_rate)
                return
            # Keras assumes distinct rows.
            super().update_step(sum_duplicates(gradient), variable, learning_rate)


def ranks_of(optimizer: keras.optimizers.Optimizer | None) -> cluster.Group | None:
    """Return the ranks over which an optimizer combines gradients; None for all ranks or a plain optimizer."""
    return optimizer._hvdkit.group if isinstance(optimizer, DistributedMixin) else None


def _raise(problem: Exception) -> NoReturn:
    raise problem


def check_inner(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise TypeError if an inner optimizer is distributed."""
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    if any(isinstance(part, DistributedMixin) for part in inner) and not isinstance(optimizer, LossScaleMixin):
        got = f"{type(optimizer).__name__} of a DistributedOptimizer"
        expected = "plain Keras optimizers inside"
        raise TypeError(
            describe(
                "optimizer", got, expected, "wrap only the outermost optimizer, so that gradients are combined once"
            )
        )


class LossScaleMixin(DistributedMixin):
    """Mixin for LossScaleOptimizer: all ranks take the same branch, update or skip."""

    _scaled = True

    def scale_loss(self, loss: tf.Tensor | float) -> tf.Tensor | float:
        """Multiply ``loss`` by the current scale; gradients are expected to be scaled from now on."""
        self._scaled = True
        return super().scale_loss(loss)

    @graph_safe
    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[AnyVariable] | None = None) -> object:
        """Combine ``grads``; skip the step if the gradients of any rank overflowed, else update the variables."""
        reject_unsupported()
        reduction = self._hvdkit
        placed = agree_on(partial(self._hvdkit_prepare, grads, trainable_variables), reduction, exchanges=True)
        if not placed.grads:
            return None
        partition = self.inner_optimizer._hvdkit_partition
        if partition.variables and reduction.combines:
            placed = partition.combine(placed, reduction)
        else:
            placed = combine(placed, reduction, reduction.call_site)
        if not self._scaled:
            return self.inner_optimizer.apply(placed.grads, placed.variables)
        return super().apply(placed.grads, placed.variables)

    @graph_safe
    def check_finite(self, grads: Sequence[Gradient]) -> tf.Tensor:
        """Return True if the gradients of all ranks are finite."""
        present = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in present])
        is_replicated = self._hvdkit.combines and not self._hvdkit.shard_states
        is_replicated = is_replicated and not any(holding_of(v) is not None for v in self._trainable_variables)
        return finite if is_replicated else allreduce(finite, Min, process_set=self._hvdkit.group)
