"""Any Keras 3 optimizer, updating with gradients combined over all ranks.

Keras calls ``apply`` for every step, from ``fit`` and from hand-written loops alike. A subclass of the optimizer's own
class is made whose ``apply`` combines the gradients before it hands them on. With ``accumulate_steps`` the
gradients are first added up locally by Keras, and combined where Keras clips them: once for every update.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf
from packaging import version

from hvdkit import cluster
from hvdkit.collectives import allreduce
from hvdkit.collectives.graphs import refuse_xla
from hvdkit.collectives.ops import Average, Min, ReduceOp, checked_op
from hvdkit.collectives.values import graph_safe
from hvdkit.errors import HvdkitError, describe
from hvdkit.gradients import average_gradients
from hvdkit.gradients.compression import wire_dtype

if version.parse(keras.__version__) < version.parse("3.5"):
    raise ImportError(
        describe("keras", keras.__version__, "3.5 or newer: older ones clip before they accumulate", "upgrade keras")
    )

_LossScale = keras.optimizers.LossScaleOptimizer
# Younger than Keras 3.5.
_Multi = getattr(keras.optimizers, "MultiOptimizer", ())


@dataclass(frozen=True, kw_only=True)
class _Reduction:
    """What a distributed optimizer does to gradients before Keras sees them."""

    op: ReduceOp
    compression: str | None
    accumulate_steps: int
    clip_global_norm: float | None
    combines: bool = True

    def combine(self, grads: Sequence[Any]) -> list[Any]:
        if not self.combines:
            return list(grads)
        return average_gradients(grads, op=self.op, compression=self.compression)

    def clip(self, grads: Sequence[Any], loss_scale: float | None = None) -> list[Any]:
        """Scale all gradients so that their global norm, a replicated gradient counted once, is at most the limit."""
        if self.clip_global_norm is None:
            return list(grads)
        return tf.clip_by_global_norm(list(grads), self.clip_global_norm * (loss_scale or 1.0))[0]


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    op: ReduceOp = Average,
    compression: str | None = None,
    accumulate_steps: int = 1,
    clip_global_norm: float | None = None,
) -> keras.optimizers.Optimizer:
    """Return a copy of ``optimizer`` that combines gradients over all ranks before each update.

    The copy is an instance of the optimizer's class, for ``model.compile``, ``apply`` and ``apply_gradients``; Keras
    saves it as that class, and a saved model loads without hvdkit. Where ``optimizer`` has been built, its iteration
    count and slots are copied. Under the ``mixed_float16`` policy the copy is a ``LossScaleOptimizer`` around it,
    whose scaling is on where ``scale_loss`` is called, as ``fit`` does.

    Args:
        optimizer: any Keras 3 optimizer, ``LossScaleOptimizer`` and ``MultiOptimizer`` included.
        op: ``hk.Average`` (losses are means over the local batch) or ``hk.Sum`` (losses are sums).
        compression: None, ``"fp16"`` or ``"bf16"``: how gradients travel.
        accumulate_steps: number of steps whose gradients are added up locally before they are combined and
            applied. One update equals one step on all their examples; learning-rate schedules count steps, not updates.
        clip_global_norm: upper limit of the combined gradient's L2 norm over all variables.

    Returns:
        A ``keras.optimizers.Optimizer``.

    Raises:
        TypeError: ``optimizer`` is no Keras 3 optimizer, or is distributed already.
        ValueError: another argument is none of the above.
        HvdkitError: at the first step, inside ``jit_compile=True``: Horovod has no XLA kernels.

    Example::

        model.compile(hk.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse", jit_compile=False)
    """
    _check_optimizer(optimizer)
    wire_dtype(compression)
    steps = _accumulation(optimizer, accumulate_steps)
    if clip_global_norm is not None and not clip_global_norm > 0:
        raise ValueError(describe("clip_global_norm", clip_global_norm, "a number > 0, or None", "pass e.g. 1.0"))
    if checked_op(op) not in (ReduceOp.Average, ReduceOp.Sum):
        raise ValueError(describe("op", op, "hk.Average or hk.Sum", "pass one of them"))
    how = _Reduction(
        op=checked_op(op), compression=compression, accumulate_steps=steps, clip_global_norm=clip_global_norm
    )
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, _LossScale):
        outer = _distributed_loss_scale(_LossScale(_copy(optimizer, type(optimizer))), how)
        outer._scaled = False  # nobody asked for it: it divides only where scale_loss has multiplied
        return outer
    return _distributed(optimizer, how)


def _distributed(optimizer: Any, how: _Reduction) -> Any:
    if isinstance(optimizer, _LossScale):
        return _distributed_loss_scale(optimizer, how)
    if _Multi and isinstance(optimizer, _Multi):
        return _distributed_multi(optimizer, how)
    copy = _copy(optimizer, _subclass(_Combining, type(optimizer)), how.accumulate_steps)
    copy._hvdkit = how
    return copy


def _distributed_loss_scale(optimizer: Any, how: _Reduction) -> Any:
    """Combine scaled gradients, so that all ranks see the same overflow; clip them unscaled, in the inner optimizer."""
    accumulates = how.accumulate_steps > 1
    inner = _distributed(optimizer.inner_optimizer, replace(how, combines=accumulates))
    outer = _subclass(_CombiningScaled, type(optimizer)).from_config(optimizer.get_config())
    outer.inner_optimizer = inner
    outer._hvdkit = replace(how, combines=not accumulates, clip_global_norm=None)
    if optimizer.built:
        outer.build(optimizer._trainable_variables)
        for own, other in zip(outer._variables, optimizer._variables, strict=True):
            own.assign(other)
    return outer


def _distributed_multi(optimizer: Any, how: _Reduction) -> Any:
    if how.accumulate_steps > 1:
        raise ValueError(
            describe(
                "accumulate_steps",
                how.accumulate_steps,
                "1 with a MultiOptimizer",
                "set gradient_accumulation_steps on its inner optimizers",
            )
        )
    copy = _copy(optimizer, _subclass(_Combining, type(optimizer)))
    copy._hvdkit = how
    return copy


class _Combining:
    """Mixed in before a Keras optimizer class: combine gradients over ranks, then go on as that class does."""

    _hvdkit = _Reduction(op=Average, compression=None, accumulate_steps=1, clip_global_norm=None)
    _hvdkit_wrapped = False

    def build(self, variables: Sequence[Any]) -> None:
        """Create the slots of ``variables``."""
        # A LossScaleOptimizer around this one builds it, and in eager mode leaves no other trace before it skips
        # this rank's apply while other ranks wait in theirs.
        caller = sys._getframe(1).f_locals.get("self")
        self._hvdkit_wrapped = isinstance(caller, _LossScale) and not isinstance(caller, _CombiningScaled)
        super().build(variables)  # type: ignore[misc]

    @graph_safe
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Combine ``grads`` over all ranks and update the variables."""
        how = self._hvdkit
        _refuse_what_breaks(self._hvdkit_wrapped)
        if how.accumulate_steps == 1:
            scale = getattr(self, "loss_scale_factor", None)
            grads = how.clip(how.combine(grads), scale)
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        self._hvdkit_combined = False
        result = super().apply(grads, trainable_variables)  # type: ignore[misc]
        if tf.inside_function() and not self._hvdkit_combined:
            raise HvdkitError(
                f"accumulate_steps: Keras {keras.__version__} kept the accumulated gradients; use accumulate_steps=1"
            )
        return result

    @graph_safe
    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # Keras clips once per update, after it added up the steps' gradients and took their mean.
        how = self._hvdkit
        if how.accumulate_steps > 1:
            self._hvdkit_combined = True
            if how.op == ReduceOp.Sum:
                grads = [g * float(how.accumulate_steps) for g in grads]
            grads = how.clip(how.combine(grads))
        return super()._clip_gradients(grads)  # type: ignore[misc]


class _CombiningScaled:
    """Mixed in before LossScaleOptimizer: every rank takes the same branch, update or skip."""

    _hvdkit: _Reduction
    _scaled = True

    def scale_loss(self, loss: Any) -> Any:
        """Multiply ``loss`` by the current scale; from now on gradients are taken to be scaled."""
        self._scaled = True
        return super().scale_loss(loss)  # type: ignore[misc]

    @graph_safe
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Combine ``grads``, skip the step where any rank's overflowed, else update the variables."""
        _refuse_what_breaks()
        grads = self._hvdkit.combine(grads)
        if not self._scaled:
            return self.inner_optimizer.apply(grads, trainable_variables)  # type: ignore[attr-defined]
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    @graph_safe
    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Return True where every rank's gradients are finite."""
        present = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in present])
        return finite if self._hvdkit.combines else allreduce(finite, Min)


_classes: dict[tuple[type, type], type] = {}


def _subclass(mixin: type, base: type) -> Any:
    """Return ``base`` with ``mixin`` before it, under the name of ``base`` so that Keras saves it as that class."""
    if (mixin, base) not in _classes:
        # Keras writes its public module into files, and so do we: the private one may move.
        public = getattr(keras.optimizers, base.__name__, None) is base
        module = "keras.optimizers" if public else base.__module__
        namespace = {"__module__": module, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
        _classes[mixin, base] = type(base.__name__, (mixin, base), namespace)
    return _classes[mixin, base]


def _copy(optimizer: Any, cls: Any, accumulate_steps: int = 1) -> Any:
    try:
        config = optimizer.get_config()
        if isinstance(getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule):
            config["learning_rate"] = optimizer._learning_rate  # itself: Keras would look for a registered class
        if accumulate_steps > 1:
            config["gradient_accumulation_steps"] = accumulate_steps
        copy = cls.from_config(config)
    except Exception as error:
        raise TypeError(
            describe(
                "optimizer",
                f"{type(optimizer).__name__} that cannot be copied ({error})",
                "an optimizer whose get_config and from_config round-trip",
                "give it and its learning rate schedule a get_config",
            )
        ) from error
    for name, value in vars(optimizer).items():
        if name.startswith("_exclude_from_weight_decay"):  # said after construction, and in no config
            setattr(copy, name, value)
    if optimizer.built:
        copy.build(optimizer._trainable_variables)
        _copy_state(optimizer, copy, accumulate_steps)
    return copy


def _copy_state(optimizer: Any, copy: Any, accumulate_steps: int) -> None:
    """Give ``copy`` the iteration count and slots of ``optimizer``, which may be without sums of gradients so far."""
    mine, theirs = copy.variables, optimizer.variables
    begins_to_accumulate = len(mine) > len(theirs)
    if begins_to_accumulate:
        sums = {id(v) for v in copy._accumulated_gradients}
        mine = [v for v in mine if id(v) not in sums]
    for own, other in zip(mine, theirs, strict=True):
        own.assign(other)
    if begins_to_accumulate:
        # Keras counts the steps between updates, too: the next update is due after that many more.
        copy._iterations.assign(optimizer._iterations * accumulate_steps)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, (_Combining, _CombiningScaled)):
        raise TypeError(
            describe(
                "optimizer", "a DistributedOptimizer", "a plain Keras optimizer", "wrap it once; twice combines twice"
            )
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            describe(
                "optimizer",
                f"{type(optimizer).__module__}.{type(optimizer).__name__}",
                "a Keras 3 optimizer, e.g. keras.optimizers.SGD(0.1)",
                "tf_keras, tf.compat.v1 and string optimizers have to be replaced by one of keras.optimizers",
            )
        )


def _accumulation(optimizer: Any, accumulate_steps: int) -> int:
    """Return how many steps to accumulate, said here or in the optimizer's own gradient_accumulation_steps."""
    if not isinstance(accumulate_steps, int) or accumulate_steps < 1:
        raise ValueError(describe("accumulate_steps", accumulate_steps, "a whole number >= 1", "pass e.g. 4"))
    inner = optimizer.inner_optimizer if isinstance(optimizer, _LossScale) else optimizer
    own = getattr(inner, "gradient_accumulation_steps", None) or 1
    if own > 1 and accumulate_steps not in (1, own):
        raise ValueError(
            describe("accumulate_steps", accumulate_steps, f"{own}, as the optimizer was made with", "say it once")
        )
    return max(own, accumulate_steps)


def _refuse_what_breaks(wrapped: bool = False) -> None:
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
