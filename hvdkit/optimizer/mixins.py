"""What is mixed in before a Keras optimizer's class: gradients combined over ranks, and shards updated by rows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import allreduce
from hvdkit.collectives.graphs import refuse_xla
from hvdkit.collectives.ops import Average, Min, ReduceOp
from hvdkit.collectives.shards import mark, shard_of
from hvdkit.collectives.values import graph_safe
from hvdkit.errors import HvdkitError, describe
from hvdkit.gradients.sparse import sum_duplicates
from hvdkit.optimizer.parts import Parts
from hvdkit.optimizer.reduction import Reduction
from hvdkit.optimizer.rows import BY_ELEMENTS, rule_for, update_rows, updating_class
from hvdkit.optimizer.slots import Slots, fill, renew

LossScale = keras.optimizers.LossScaleOptimizer


class Combining:
    """Mixed in before a Keras optimizer class: combine gradients over ranks, then go on as that class does."""

    _hvdkit = Reduction(op=Average, compression=None, accumulate_steps=1, clip_global_norm=None)
    _hvdkit_wrapped = False
    _hvdkit_slots: Slots | None = None
    _hvdkit_parts: Parts | None = None  # where ranks divide the slots of replicated variables

    def build(self, variables: Sequence[Any]) -> None:
        """Create the slots of ``variables``."""
        # A LossScaleOptimizer around this one builds it, and in eager mode leaves no other trace before it skips
        # this rank's apply while other ranks wait in theirs.
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_locals.get("self") is self:
            frame = frame.f_back
        caller = frame.f_locals.get("self")
        self._hvdkit_wrapped = isinstance(caller, LossScale) and not isinstance(caller, CombiningScaled)
        for variable in variables:
            if (shard := shard_of(variable)) is not None:
                check_by_elements(self, "beside sharded variables")
                _check_for_shards(self)
                mark(variable, shard)  # the TensorFlow variable inside, which may be younger than the mark
        super().build(variables)  # type: ignore[misc]

    def add_variable_from_reference(self, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        """Create a slot; that of a sharded variable is a shard like it."""
        shard = shard_of(reference_variable)
        inner = getattr(reference_variable, "_value", None)
        # A table that is kept in the host's memory has its slots there, too.
        with tf.device(inner.device) if isinstance(inner, tf.Variable) else contextlib.nullcontext():
            first = initializer if shard is None else "zeros"
            slot = super().add_variable_from_reference(reference_variable, name=name, initializer=first)  # type: ignore[misc]
        if shard is not None:
            fill(slot, initializer)
            mark(slot, shard.of_slot(name or "var"))
            if shard.uses is not None:
                self._hvdkit_slots = self._hvdkit_slots or Slots()
                self._hvdkit_slots.add(reference_variable, name or "", slot, initializer)
        return slot

    @graph_safe
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Combine ``grads`` over all ranks and update the variables."""
        how = self._hvdkit
        refuse_what_breaks(self._hvdkit_wrapped)
        variables = listed(self, trainable_variables)
        renew(grads, variables, whole=how.accumulate_steps > 1)
        if how.accumulate_steps == 1:
            scale = getattr(self, "loss_scale_factor", None)
            grads = self._hvdkit_combine(grads, variables, scale)
            if getattr(self, "clipvalue", None) is not None:  # Keras clips numbers, which are sums over ranks
                grads = [sum_duplicates(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        self._hvdkit_combined = False
        grads = how.share(grads, variables)
        result = super().apply(grads, trainable_variables)  # type: ignore[misc]
        if tf.inside_function() and not self._hvdkit_combined:
            raise HvdkitError(
                f"accumulate_steps: Keras {keras.__version__} kept the accumulated gradients; use accumulate_steps=1"
            )
        return result

    def _hvdkit_combine(self, grads: Sequence[Any], variables: Sequence[Any], loss_scale: Any = None) -> list[Any]:
        """Return what Keras is to update ``variables`` with."""
        how = self._hvdkit
        return how.clip(how.combine(grads, variables), variables, loss_scale)

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
            grads = self._hvdkit_combine(how.share(grads, variables, undo=True), variables)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    @graph_safe
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable; of a shard the rows alone that the gradient has, where the optimizer can."""
        if shard_of(variable) is None:
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]
            return
        if 0 in variable.shape:  # this rank holds nothing of it, and Keras's ops do not take that
            return
        rule = rule_for(self, self._hvdkit.sparse_updates)
        with tf.device(getattr(variable, "_value", variable).device):  # the host's, where the table is kept there
            if rule is not None:
                update_rows(rule, self, variable, gradient, learning_rate)
                return
            if isinstance(gradient, tf.IndexedSlices):
                gradient = sum_duplicates(gradient)  # Keras takes rows to be distinct
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]


@dataclass(frozen=True)
class _Untracked:
    """Variables that an optimizer holds but does not own: Keras would track a plain list of them."""

    variables: tuple[Any, ...]


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


def _check_for_shards(optimizer: Any) -> None:
    if hasattr(optimizer, "optimizers"):
        remedy = "give each of its optimizers its own hk.DistributedOptimizer and apply"
        raise ValueError(describe("optimizer", "a MultiOptimizer", "one optimizer for sharded variables", remedy))


class CombiningScaled:
    """Mixed in before LossScaleOptimizer: every rank takes the same branch, update or skip."""

    _hvdkit: Reduction
    _scaled = True

    def scale_loss(self, loss: Any) -> Any:
        """Multiply ``loss`` by the current scale; from now on gradients are taken to be scaled."""
        self._scaled = True
        return super().scale_loss(loss)  # type: ignore[misc]

    @graph_safe
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Combine ``grads``, skip the step where any rank's overflowed, else update the variables."""
        refuse_what_breaks()
        how, variables = self._hvdkit, listed(self, trainable_variables)
        if not self.built:  # type: ignore[attr-defined]
            with keras.name_scope(self.name, caller=self):  # type: ignore[attr-defined]
                self.build(variables)  # type: ignore[attr-defined]
        parts = self.inner_optimizer._hvdkit_parts  # type: ignore[attr-defined]
        if parts is not None and how.combines:
            grads = parts.combine(grads, variables, how.op, how.compression)
        else:
            grads = how.combine(grads, variables)
        if not self._scaled:
            return self.inner_optimizer.apply(grads, trainable_variables)  # type: ignore[attr-defined]
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    @graph_safe
    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Return True where every rank's gradients are finite."""
        present = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in present])
        alike = self._hvdkit.combines and not self._hvdkit.shard_states
        alike = alike and not any(shard_of(v) is not None for v in listed(self, None))
        return finite if alike else allreduce(finite, Min)


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
