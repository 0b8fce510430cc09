"""Wrap any Keras 3 optimizer so that it updates with gradients combined over all ranks.

``fit`` and custom training loops call ``apply`` in every step. The result is an instance of a subclass of the
optimizer's class, whose ``apply`` combines the gradients before passing them on. With ``accumulate_steps``, Keras first
accumulates the gradients locally; they are combined when Keras clips them, once per update.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import keras
from packaging import version

from hvdkit import cluster
from hvdkit.collectives.ops import Average, ReduceOp, checked_op
from hvdkit.collectives.process_sets import RankGroup, resolve
from hvdkit.errors import describe
from hvdkit.machine.supported import OLDEST_KERAS
from hvdkit.optimizer.compression import wire_dtype
from hvdkit.optimizer.copies import copy_of, subclass
from hvdkit.optimizer.inner_optimizers import LossScale, updater_of
from hvdkit.optimizer.mixin import DistributedMixin
from hvdkit.optimizer.optimizer_checks import check_inner, check_shardable
from hvdkit.optimizer.reduction import Reduction
from hvdkit.optimizer.row_updates import SparseUpdates
from hvdkit.sharding.shards import holding_of, is_local
from hvdkit.sharding.variables import compare_variables

if version.parse(keras.__version__).release[:2] < OLDEST_KERAS:
    expected = f"{'.'.join(map(str, OLDEST_KERAS))} or newer"
    raise ImportError(describe("keras", keras.__version__, expected, "pip install --upgrade keras"))

# Added after Keras 3.5.
_Multi = getattr(keras.optimizers, "MultiOptimizer", ())


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    op: ReduceOp | None = Average,
    compression: str | None = None,
    accumulate_steps: int = 1,
    clip_global_norm: float | None = None,
    sparse_updates: SparseUpdates = "auto",
    shard_states: bool = False,
    process_set: RankGroup = None,
) -> keras.optimizers.Optimizer:
    """Return a copy of ``optimizer`` that combines gradients over all ranks before each update.

    The copy is an instance of the optimizer's class, for use with ``model.compile``, ``apply`` and ``apply_gradients``.
    Keras saves it as that class, so a saved model loads without hvdkit. It copies the options, the iteration count, the
    learning rate and, if ``optimizer`` is built, the slots; other attributes are shared. If the learning rate is a
    function, it may read ``optimizer.iterations``, so the iteration count is shared as well and ``optimizer`` can be
    wrapped only once. Under the ``mixed_float16`` policy the result is a ``LossScaleOptimizer`` around the copy; it
    unscales gradients only if ``scale_loss`` is called, as ``fit`` does. To train without loss scaling, pass the plain
    optimizer to ``model.compile(..., auto_scale_loss=False)`` and call ``hk.fit``.

    Gradients of local variables (``hk.register_local_variables``) are scaled but not exchanged. Users can also
    call ``register_local_var(variable)`` on the copy before it is built.

    Args:
        optimizer: any Keras 3 optimizer, including ``LossScaleOptimizer`` and ``MultiOptimizer``.
        op: ``hk.Average`` (losses are means over the local batch) or ``hk.Sum`` (losses are sums); None if the
            gradients are already combined by ``hk.DistributedGradientTape``.
        compression: None, ``"fp16"`` or ``"bf16"``: dtype in which gradients are exchanged.
        accumulate_steps: number of steps whose gradients are accumulated locally before they are combined and applied.
            One update equals one step on all their examples; learning-rate schedules count steps, not updates.
        clip_global_norm: upper limit of the combined gradient's L2 norm over all variables.
        sparse_updates: how sharded tables are updated. "exact": as Keras updates the unsharded table. "lazy": only the
            rows in the gradient, including their moments. "auto": lazy for Adam and AdamW, exact for the others. For
            plain SGD and Adagrad the two are identical.
        shard_states: shard the slots of replicated variables over the N ranks (ZeRO stage 1): each rank keeps and
            updates 1/N of them. Results are the same. With S bytes of variables and k slots each, a rank keeps k S / N
            bytes instead of k S; per step it sends and receives (N-1)/N S of gradients and (N-1)/N S of weights, as
            much as a ring allreduce. For element-wise optimizers only.
        process_set: the ranks that combine their gradients, each with its own batch: an ``hk.ProcessSet`` or an axis
            of the mesh. Only these ranks pass it. Default: all ranks. Not supported with ``shard_states`` or sharded
            variables.

    Returns:
        A ``keras.optimizers.Optimizer``.

    Raises:
        TypeError: ``optimizer`` is not a Keras 3 optimizer, is already distributed, or is built and cannot be copied;
            the message names the attribute.
        ValueError: another argument is invalid, ``process_set`` does not contain this rank, or ``shard_states`` is used
            with an optimizer that takes norms of whole variables (Lamb, Adafactor, Muon, clipnorm).
        CollectiveMismatchError: with ``shard_states``, the state of a built optimizer differs between ranks.
        HvdkitError: at the first step with ``jit_compile=True``: Horovod has no XLA kernels.

    Examples:
        In plain ``fit``, and in a custom training loop:

        >>> import keras
        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(hk.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse", jit_compile=False)
        >>> x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")  # this rank's data
        >>> history = model.fit(x, y, verbose=0, callbacks=[hk.callbacks.BroadcastInitial()])

        >>> w = tf.Variable(1.0)
        >>> optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.5))
        >>> optimizer.apply([tf.constant(2.0 * hk.rank())], [w])  # the average over ranks is size - 1
        >>> float(w) == 1 - 0.5 * (hk.size() - 1)
        True
    """
    return distribute(
        optimizer,
        adds_loss_scale=keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, LossScale),
        op=op,
        compression=compression,
        accumulate_steps=accumulate_steps,
        clip_global_norm=clip_global_norm,
        sparse_updates=sparse_updates,
        shard_states=shard_states,
        process_set=process_set,
    )


def distribute(
    optimizer: keras.optimizers.Optimizer,
    *,
    adds_loss_scale: bool = False,
    op: ReduceOp | None = Average,
    compression: str | None = None,
    accumulate_steps: int = 1,
    clip_global_norm: float | None = None,
    sparse_updates: SparseUpdates = "auto",
    shard_states: bool = False,
    process_set: RankGroup = None,
) -> keras.optimizers.Optimizer:
    """Do what :func:`DistributedOptimizer` does, with or without adding a ``LossScaleOptimizer``.

    ``model.compile`` has added one to the model's optimizer already, unless its user passed ``auto_scale_loss=False``.
    """
    _check_optimizer(optimizer)
    wire_dtype(compression)
    steps = _accumulation(optimizer, accumulate_steps)
    if clip_global_norm is not None and not clip_global_norm > 0:
        raise ValueError(describe("clip_global_norm", clip_global_norm, "a number > 0, or None", "pass e.g. 1.0"))
    if sparse_updates not in get_args(SparseUpdates):
        raise ValueError(describe("sparse_updates", sparse_updates, "'auto', 'lazy' or 'exact'", "pass one of them"))
    if op is not None and checked_op(op) not in (ReduceOp.Average, ReduceOp.Sum):
        raise ValueError(describe("op", op, "hk.Average, hk.Sum or None", "pass one of them"))
    if op is None and compression is not None:
        raise ValueError(describe("compression", compression, "None where op is None", "pass it to the tape"))
    group = resolve(process_set)
    if group is not None and shard_states:
        expected = "None with shard_states=True, which divides slots among all ranks"
        raise ValueError(describe("process_set", f"ranks {list(group.ranks)}", expected, "use one of the two"))
    options: dict[str, Any] = {
        "compression": compression,
        "accumulate_steps": steps,
        "clip_global_norm": clip_global_norm,
        "sparse_updates": sparse_updates,
        "shard_states": shard_states,
    }
    combining_op = Average if op is None else checked_op(op)
    reduction = Reduction(op=combining_op, combines=op is not None, group=group, **options)
    if shard_states:
        _check_shardable_state(optimizer)
    if adds_loss_scale:
        wrapped = _wrap_loss_scale(LossScale(copy_of(optimizer, type(optimizer))), reduction)
        wrapped._hvdkit_unscales = False  # added implicitly: unscale gradients only after a call of scale_loss
    else:
        wrapped = _wrap(optimizer, reduction)
    # Bypass Keras's tracking. A pickle contains this function.
    object.__setattr__(
        wrapped, "_hvdkit_wrap", partial(DistributedOptimizer, op=op, process_set=process_set, **options)
    )
    return wrapped


def _wrap(optimizer: keras.optimizers.Optimizer, reduction: Reduction) -> DistributedMixin:
    if isinstance(optimizer, LossScale):
        return _wrap_loss_scale(optimizer, reduction)
    if isinstance(optimizer, _Multi) and reduction.accumulate_steps > 1:
        expected = "1 with a MultiOptimizer"
        remedy = "set gradient_accumulation_steps on its inner optimizers"
        raise ValueError(describe("accumulate_steps", reduction.accumulate_steps, expected, remedy))
    cls = subclass(DistributedMixin, type(optimizer))
    steps = reduction.accumulate_steps if reduction.accumulate_steps > 1 else None
    begins = steps is not None and not optimizer.gradient_accumulation_steps
    options: dict[str, object] = {} if steps is None else {"gradient_accumulation_steps": steps}
    options["_hvdkit"] = reduction
    is_marked = any(holding_of(v) is not None for v in optimizer._trainable_variables)  # and its slots must be, too
    return copy_of(optimizer, cls, rebuilds=reduction.shard_states or begins or is_marked, **options)


def _wrap_loss_scale(optimizer: keras.optimizers.LossScaleOptimizer, reduction: Reduction) -> DistributedMixin:
    """Combine scaled gradients, so that all ranks see the same overflow; the inner optimizer clips them unscaled."""
    accumulates = reduction.accumulate_steps > 1
    reduced = reduction.combines and not accumulates
    of_inner = replace(reduction, combines=reduction.combines and accumulates, reduced=reduced)
    inner = _wrap(optimizer.inner_optimizer, of_inner)
    inner._hvdkit_has_begun = True  # the outer one compares the ranks
    of_outer = replace(reduction, combines=reduced, clip_global_norm=None)
    return copy_of(optimizer, subclass(DistributedMixin, type(optimizer)), inner_optimizer=inner, _hvdkit=of_outer)


def _check_optimizer(optimizer: object) -> None:
    if isinstance(optimizer, DistributedMixin):
        expected = "a plain Keras optimizer"
        remedy = "wrap it once, so that gradients are combined once"
        raise TypeError(describe("optimizer", "a DistributedOptimizer", expected, remedy))
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        got = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        expected = "a Keras 3 optimizer, e.g. keras.optimizers.SGD(0.1)"
        remedy = "tf_keras, tf.compat.v1 and string optimizers have to be replaced by one of keras.optimizers"
        raise TypeError(describe("optimizer", got, expected, remedy))
    check_inner(optimizer)


def _check_shardable_state(optimizer: keras.optimizers.Optimizer) -> None:
    """Reject optimizers that cannot be sharded: norms of whole variables, or state that differs between ranks."""
    check_shardable(updater_of(optimizer))
    if not optimizer.built or cluster.size() == 1:
        return
    if any(is_local(v) for v in optimizer._trainable_variables):
        got = "a built optimizer of local variables"
        expected = "one that is not built, with shard_states=True"
        raise ValueError(describe("optimizer", got, expected, "wrap it before it is built"))
    compare_variables(optimizer.variables)


def _accumulation(optimizer: keras.optimizers.Optimizer, accumulate_steps: int) -> int:
    """Return the number of steps to accumulate, from the argument or the optimizer's gradient_accumulation_steps."""
    if not isinstance(accumulate_steps, int) or accumulate_steps < 1:
        raise ValueError(describe("accumulate_steps", accumulate_steps, "a whole number >= 1", "pass e.g. 4"))
    own = getattr(updater_of(optimizer), "gradient_accumulation_steps", None) or 1
    if own > 1 and accumulate_steps not in (1, own):
        raise ValueError(
            describe("accumulate_steps", accumulate_steps, f"{own}, as the optimizer was created with", "pass it once")
        )
    return max(own, accumulate_steps)
