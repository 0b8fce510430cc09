"""What is mixed in before a Keras optimizer's class: gradients combined over ranks, and shards updated by rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import allreduce
from hvdkit.collectives.agreement import attempt
from hvdkit.collectives.graphs import refuse_xla
from hvdkit.collectives.ops import Average, Min, ReduceOp
from hvdkit.collectives.shards import Local, holding_of, is_local, mark, piece_states, shard_of
from hvdkit.collectives.values import graph_safe
from hvdkit.collectives.variables import variable_name
from hvdkit.errors import HvdkitError, describe
from hvdkit.gradients import register_local_variables
from hvdkit.gradients.coupled import check_coupled
from hvdkit.gradients.given import Given, given
from hvdkit.gradients.sparse import sum_duplicates
from hvdkit.layers.batch_norm import average_moving_statistics, check_batch_normalization
from hvdkit.marks import WeakRegistry
from hvdkit.optimizer.calling import calling_model, calling_object
from hvdkit.optimizer.copies import Original, copy_of, subclass
from hvdkit.optimizer.parts import Parts
from hvdkit.optimizer.plain_fit import Watch, begin_equal, note_batch
from hvdkit.optimizer.reduction import Reduction
from hvdkit.optimizer.rows import BY_ELEMENTS, rule_for, update_rows, updating_class
from hvdkit.optimizer.slots import Slots, fill, renew
from hvdkit.optimizer.tables import TableOptimizers, check_for_tables
from hvdkit.variable.own_optimizer import own_optimizer

LossScale = keras.optimizers.LossScaleOptimizer
_SUPERVISED: WeakRegistry[bool] = WeakRegistry()  # models


class Distributed:
    """What all distributed optimizers have beyond Keras's methods."""

    _hvdkit: Reduction
    _hvdkit_options: Mapping[str, Any] = {}
    _hvdkit_watch: Watch | None = None  # of the model that it trains in plain fit
    _hvdkit_original: Original | None = None

    @graph_safe
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Do as :meth:`apply` with pairs of a gradient and its variable; return the number of updates."""
        pairs: list[tuple[Any, Any]] = []

        def collect() -> None:
            pairs.extend((grad, variable) for grad, variable in grads_and_vars)
            if not pairs:
                remedy = "pass zip(grads, variables)"
                raise ValueError(describe("grads_and_vars", "no pair", "a pair for each variable", remedy))

        if (problem := attempt(collect)) is not None:
            self._hvdkit.agreed(lambda: _raise(problem), exchanges=True)
        return super().apply_gradients(pairs)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        # Keras makes a plain optimizer of its config: it is distributed again.
        unpickle, arguments, *_ = tuple(super().__reduce__())
        plain = getattr(keras.optimizers.Optimizer, unpickle.__name__)
        return restored, (plain, arguments, self._hvdkit_options, getattr(self, "_scaled", True))

    def stateless_apply(self, *_: Any, **__: Any) -> Any:
        """Refuse a step on tensors, as Keras does on TensorFlow."""
        remedy = "call optimizer.apply(grads, variables)"
        raise ValueError(describe("stateless_apply", "a call", "apply, which updates TensorFlow variables", remedy))

    def register_local_var(self, variable: Any) -> None:
        """Make ``variable`` local, as :func:`hvdkit.register_local_variables` does.

        Raises:
            ValueError: the optimizer has its slots already, or ``variable`` is sharded.
            TypeError: ``variable`` is something else.
        """
        if self.built:  # type: ignore[attr-defined]
            raise ValueError(_too_late(variable_name(variable)))
        register_local_variables([variable])


def restored(unpickle: Callable[..., Any], arguments: Any, options: Mapping[str, Any], scaled: bool) -> Any:
    """Return a distributed optimizer from its pickle."""
    from hvdkit.optimizer.distributed import DistributedOptimizer

    made = DistributedOptimizer(unpickle(*arguments), **options)
    if isinstance(made, CombiningScaled):
        made._scaled = scaled
    return made


class Combining(Distributed):
    """Mixed in before a Keras optimizer class: combine gradients over ranks, then go on as that class does."""

    _hvdkit = Reduction(op=Average, compression=None, accumulate_steps=1, clip_global_norm=None)
    _hvdkit_wrapped = False
    _hvdkit_local: frozenset[Any] = frozenset()  # keys of the local variables that it was built with
    _hvdkit_slots: Slots | None = None
    _hvdkit_parts: Parts | None = None  # where ranks divide the slots of replicated variables
    _hvdkit_tables: TableOptimizers | None = None  # of tables that have their own optimizer
    _hvdkit_is_own = False  # whether this one is such a table's
    _hvdkit_knows_model = False

    def build(self, variables: Sequence[Any]) -> None:
        """Create the slots of ``variables``."""
        caller = calling_object(self)
        self._hvdkit_wrapped = isinstance(caller, LossScale) and not isinstance(caller, CombiningScaled)
        if self._hvdkit_wrapped and calling_model() is not None:  # on every rank: the first step may overflow on one
            refuse_what_breaks(wrapped=True)
        if self.built:  # type: ignore[attr-defined]
            return
        for variable in variables:
            if (holding := holding_of(variable)) is None:
                continue
            if isinstance(holding, Local):
                _check_for_local(self)
                _check_for_parts(self)
            elif self._hvdkit_is_own or own_optimizer(variable) is None:
                check_by_elements(self, "beside sharded variables")
                _check_for_parts(self)
            mark(variable, holding)  # the TensorFlow variable inside, which may be younger than the mark
        _check_overwritten(self, variables)
        self._hvdkit_local = frozenset(self._var_key(v) for v in variables if is_local(v))  # type: ignore[attr-defined]
        tables = None if self._hvdkit_is_own else TableOptimizers.of(variables, self._hvdkit_of_table)
        super().build(variables if tables is None else tables.others(variables))  # type: ignore[misc]
        check_inner(self)
        if tables is not None:
            # Set plainly: Keras would track them, and count the tables among this optimizer's variables.
            object.__setattr__(self, "_hvdkit_tables", tables)
            object.__setattr__(self, "_trainable_variables", list(variables))

    def _hvdkit_of_table(self, optimizer: Any) -> Any:
        """Return a copy of a table's optimizer, which is given gradients that this one has combined."""
        how = self._hvdkit
        check_for_tables(how.accumulate_steps, how.shard_states)
        with tf.init_scope():  # Keras builds inside the graph of fit's step, which cannot read the learning rate
            copy = copy_of(optimizer, subclass(Combining, type(optimizer)))
        copy._hvdkit, copy._hvdkit_is_own = replace(how, combines=False, clip_global_norm=None), True
        copy.loss_scale_factor = self.loss_scale_factor  # type: ignore[attr-defined]
        return copy

    @property
    def variables(self) -> list[Any]:
        """The slots and counters, those of tables with their own optimizer included."""
        own = () if self._hvdkit_tables is None else self._hvdkit_tables.copies
        return [*super().variables, *(v for optimizer in own for v in optimizer.variables)]  # type: ignore[misc]

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Give the variables their moving averages, if there are any; Keras calls it at the end of ``fit``."""
        if not self._hvdkit_is_own:
            model = calling_model()
            if model is not None and not is_supervised(model):
                average_moving_statistics(model, process_set=self._hvdkit.group)
        if self._hvdkit_tables is not None:
            self._hvdkit_tables.finalize(var_list)
            var_list = self._hvdkit_tables.others(var_list)
        super().finalize_variable_values(var_list)  # type: ignore[misc]

    def add_variable_from_reference(self, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        """Create a slot; that of a sharded variable is a shard like it, that of a local one local."""
        shard = shard_of(reference_variable)
        inner = getattr(reference_variable, "_value", None)
        # A table that is kept in the host's memory has its slots there, too.
        with tf.device(inner.device) if isinstance(inner, tf.Variable) else contextlib.nullcontext():
            first = initializer if shard is None else "zeros"
            slot = super().add_variable_from_reference(reference_variable, name=name, initializer=first)  # type: ignore[misc]
        if is_local(reference_variable):
            mark(slot, Local())
        if shard is not None:
            fill(slot, initializer)
            mark(slot, shard.of_slot(name or "var"))
            if shard.uses is not None:
                self._hvdkit_slots = self._hvdkit_slots or Slots()
                self._hvdkit_slots.add(reference_variable, name or "", slot, initializer)
        return slot

    def load_own_variables(self, store: Any) -> None:
        """Load what Keras saved; of the slots of sharded variables this rank's part.

        Raises:
            ValueError: the tables of a variable were not saved one by one.
        """
        if len(store.keys()) != len(self.variables) or not any(map(shard_of, self.variables)):
            super().load_own_variables(store)  # type: ignore[misc]
            return
        for number, variable in enumerate(self.variables):
            whole, parts = store[str(number)], piece_states(variable)
            if not parts:
                variable.assign(whole)
                continue
            if len(parts) > 1 or tuple(whole.shape) != tuple(parts[0].shape):
                got = f"slots {list(whole.shape)} of {[part.name for part in parts]}"
                remedy = "pass compile=False and compile again, or continue from a hk.Supervisor's checkpoint"
                raise ValueError(describe("optimizer", got, "slots of one whole table", remedy))
            parts[0].assign_local(whole[tuple(slice(i.start, i.stop, i.step) for i in parts[0].local_index)])

    @graph_safe
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Combine ``grads`` over all ranks and update the variables."""
        how = self._hvdkit
        refuse_what_breaks(self._hvdkit_wrapped)

        def prepare() -> Given:
            found = given_to(self, grads, trainable_variables)
            self._hvdkit_check_model(found.variables)
            return how.shared(found)

        if how.accumulate_steps == 1:
            scale = getattr(self, "loss_scale_factor", None)
            found = self._hvdkit_combine(prepare, scale)
            if getattr(self, "clipvalue", None) is not None:  # Keras clips numbers, which are sums over ranks
                found = found.map(lambda g, _: sum_duplicates(g) if isinstance(g, tf.IndexedSlices) else g)
            renew(found.grads, found.variables, whole=False)
            return self._hvdkit_update(found)
        self._hvdkit_combined = False
        found = how.share(prepare())
        renew(found.grads, found.variables, whole=True)
        result = self._hvdkit_update(found)
        if tf.inside_function() and not self._hvdkit_combined:
            raise HvdkitError(
                f"accumulate_steps: Keras {keras.__version__} kept the accumulated gradients; use accumulate_steps=1"
            )
        return result

    def _hvdkit_check_model(self, variables: Any) -> None:
        """In the first step, refuse a model whose forward pass is not that of the global batch."""
        if self._hvdkit_knows_model:
            note_batch(self)
            return
        self._hvdkit_knows_model = True
        if (model := calling_model()) is not None:
            check_batch_normalization(model)
            begin_equal(model, self, self._hvdkit.group)
        else:
            check_coupled(variables)

    def _hvdkit_combine(self, prepare: Callable[[], Given], loss_scale: Any = None) -> Given:
        """Return what Keras is to update variables with."""
        how = self._hvdkit
        found = how.agreed(prepare, exchanges=how.clip_global_norm is not None and not how.reduced)
        return found.with_grads(how.clip(found.with_grads(how.combine(found)), loss_scale))

    def _hvdkit_update(self, found: Given) -> Any:
        """Update variables as Keras does; those of tables with their own optimizer by that."""
        grads, variables = found.grads, found.variables
        if self._hvdkit_tables is not None:
            grads, variables = self._hvdkit_tables.apply(grads, variables)
            if not grads:  # Keras would not count the step
                self._iterations.assign_add(1)  # type: ignore[attr-defined]
                return None
        return super().apply(grads, variables)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> Any:
        self._hvdkit_updated = _Untracked(tuple(trainable_variables))
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    @graph_safe
    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # Keras clips once per update, after it added up the steps' gradients and took their mean.
        how = self._hvdkit
        if how.accumulate_steps > 1:
            self._hvdkit_combined = True
            if how.op == ReduceOp.Sum:
                grads = [g * float(how.accumulate_steps) for g in grads]
            variables = self._hvdkit_updated.variables
            grads = self._hvdkit_combine(lambda: how.share(given(grads, variables), undo=True)).grads
        return super()._clip_gradients(grads)  # type: ignore[misc]

    @graph_safe
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable; of a shard the rows alone that the gradient has, where the optimizer can."""
        if (shard := shard_of(variable)) is None:
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]
            return
        if 0 in variable.shape:  # this rank holds nothing of it, and Keras's ops do not take that
            return
        rule = rule_for(self, self._hvdkit.sparse_updates)
        with tf.device(getattr(variable, "_value", variable).device):  # the host's, where the table is kept there
            if rule is not None:
                update_rows(rule, self, variable, shard, gradient, learning_rate)
                return
            if isinstance(gradient, tf.IndexedSlices):
                gradient = sum_duplicates(gradient)  # Keras takes rows to be distinct
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]


@dataclass(frozen=True)
class _Untracked:
    """Variables that an optimizer holds but does not own: Keras would track a plain list of them."""

    variables: tuple[Any, ...]


def set_supervised(model: Any, supervised: bool) -> None:
    """Note that a Supervisor runs a model's ``fit``: it saves each rank's own moving statistics, and then averages."""
    _SUPERVISED.set(model, supervised)


def is_supervised(model: Any) -> bool:
    """Return True while a Supervisor runs the model's ``fit``."""
    return bool(_SUPERVISED.get(model))


def ranks_of(optimizer: Any) -> cluster.Group | None:
    """Return the ranks among which an optimizer combines gradients; None for all, and for a plain optimizer."""
    return optimizer._hvdkit.group if isinstance(optimizer, Distributed) else None


def listed(optimizer: Any, variables: Any) -> list[Any]:
    """Return the variables that gradients given to ``apply`` belong to."""
    return list(optimizer._trainable_variables if variables is None else variables)


def check_by_elements(optimizer: Any, where: str) -> None:
    """Refuse what takes norms of whole variables, of which this rank has a part.

    Args:
        optimizer: a Keras optimizer.
        where: says when, for the message.

    Raises:
        ValueError: it takes them.
    """
    for name in ("clipnorm", "global_clipnorm"):
        if getattr(optimizer, name, None) is not None:
            remedy = "pass clip_global_norm to hk.DistributedOptimizer, which sums over ranks"
            raise ValueError(describe(name, getattr(optimizer, name), f"None {where}", remedy))
    kind = updating_class(optimizer)
    if kind.__module__.startswith("keras.") and kind not in BY_ELEMENTS:
        expected = f"one that updates each number by itself {where}"
        remedy = "take " + ", ".join(sorted(cls.__name__ for cls in BY_ELEMENTS))
        raise ValueError(describe("optimizer", kind.__name__, expected, remedy))


def given_to(optimizer: Any, grads: Any, trainable_variables: Any) -> Given:
    """Return what ``apply`` got, checked; build the optimizer first. All that can raise before an exchange is here."""
    if trainable_variables is None and not optimizer.built:
        expected = "the variables, as the optimizer must already be built without them"
        raise ValueError(describe("trainable_variables", None, expected, "pass them, or call optimizer.build before"))
    variables = listed(optimizer, trainable_variables)
    grads = list(grads) if isinstance(grads, Iterator) else grads
    if isinstance(grads, (list, tuple)) and not grads:  # to Keras this is a step without an update
        variables = []
    found = given(grads, variables)
    if not optimizer.built:
        is_multi = hasattr(optimizer, "optimizers")  # which gives its variables no scope
        with contextlib.nullcontext() if is_multi else keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
    tables = getattr(optimizer, "_hvdkit_tables", None)
    optimizer._check_variables_are_known(variables if tables is None else tables.others(variables))
    known = getattr(optimizer, "inner_optimizer", optimizer)._hvdkit_local
    for variable, kind in zip(variables, found.kinds, strict=True):
        if kind == "local" and optimizer._var_key(variable) not in known:
            raise ValueError(_too_late(variable_name(variable)))
    return found


def _too_late(name: str) -> str:
    got, expected = f"{name}, made local after the optimizer was built", "local variables that it was built with"
    return describe("variables", got, expected, "call hk.register_local_variables before the optimizer's first step")


def _raise(problem: Exception) -> Any:
    raise problem


def check_inner(optimizer: Any) -> None:
    """Refuse optimizers inside ``optimizer`` that are distributed themselves.

    Raises:
        TypeError: one is.
    """
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    if any(isinstance(part, Distributed) for part in inner) and not isinstance(optimizer, CombiningScaled):
        got, expected = f"{type(optimizer).__name__} of a DistributedOptimizer", "plain Keras optimizers inside"
        raise TypeError(describe("optimizer", got, expected, "wrap the outermost optimizer only; twice combines twice"))


def _check_for_parts(optimizer: Any) -> None:
    if hasattr(optimizer, "optimizers"):
        remedy = "give each of its optimizers its own hk.DistributedOptimizer and apply"
        expected = "one optimizer for sharded or local variables"
        raise ValueError(describe("optimizer", "a MultiOptimizer", expected, remedy))


def _check_for_local(optimizer: Any) -> None:
    if getattr(optimizer, "global_clipnorm", None) is not None:  # another norm on each rank, for replicated ones too
        remedy = "pass clip_global_norm to hk.DistributedOptimizer, which sums over ranks"
        expected = "None with local variables"
        raise ValueError(describe("global_clipnorm", optimizer.global_clipnorm, expected, remedy))


def _check_overwritten(optimizer: Any, variables: Sequence[Any]) -> None:
    if optimizer._hvdkit.accumulate_steps == 1 or cluster.size() == 1:
        return
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            got, expected = f"{variable_name(variable)} (overwrite_with_gradient)", "variables that gradients update"
            raise ValueError(describe("variables", got, expected, "use accumulate_steps=1 with float8 layers"))


class CombiningScaled(Distributed):
    """Mixed in before LossScaleOptimizer: every rank takes the same branch, update or skip."""

    _scaled = True

    def scale_loss(self, loss: Any) -> Any:
        """Multiply ``loss`` by the current scale; from now on gradients are taken to be scaled."""
        self._scaled = True
        return super().scale_loss(loss)  # type: ignore[misc]

    @graph_safe
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Combine ``grads``, skip the step where any rank's overflowed, else update the variables."""
        refuse_what_breaks()
        how = self._hvdkit
        found = how.agreed(lambda: how.shared(given_to(self, grads, trainable_variables)), exchanges=True)
        if not found.grads:
            return None
        parts = self.inner_optimizer._hvdkit_parts  # type: ignore[attr-defined]
        if parts is not None and how.combines:
            combined = parts.combine(found, how.averaging)
        else:
            combined = how.combine(found)
        if not self._scaled:
            return self.inner_optimizer.apply(combined, found.variables)  # type: ignore[attr-defined]
        return super().apply(combined, found.variables)  # type: ignore[misc]

    @graph_safe
    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Return True where every rank's gradients are finite."""
        present = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in present])
        alike = self._hvdkit.combines and not self._hvdkit.shard_states
        alike = alike and not any(holding_of(v) is not None for v in listed(self, None))
        return finite if alike else allreduce(finite, Min, process_set=self._hvdkit.group)


def refuse_what_breaks(wrapped: bool = False) -> None:
    """Refuse XLA, and a loss scale around the optimizer: ranks without an overflow would wait for the one with it."""
    if cluster.size() == 1:
        return
    refuse_xla()
    if wrapped:
        raise HvdkitError(
            describe(
                "optimizer",
                "a LossScaleOptimizer around a DistributedOptimizer, which skips apply() on the rank that overflows",
                "apply() on every rank at every step",
                "wrap the other way round: hk.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))",
            )
        )
