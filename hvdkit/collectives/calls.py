"""Runs one call of a collective: as part of a graph, or eagerly after the ranks have compared their calls.

In both cases the result has the collective's gradient, at every size and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster import Group, progress
from hvdkit.cluster.agreement import gather
from hvdkit.cluster.lone_training import lone_training
from hvdkit.collectives import tensors
from hvdkit.collectives.batch_share import gradient_factor, times_share, without_outer_tape
from hvdkit.collectives.call_checks import JOIN, SMALL_BYTES, Call, agree_on_call
from hvdkit.collectives.conversion import SameKind, TensorLike, as_tensor, is_symbolic, result_converter
from hvdkit.collectives.refusal import require_allowed
from hvdkit.errors import describe
from hvdkit.internals import record

Tensors = list[tf.Tensor]
Results = list[tf.Tensor] | list[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective with its arguments.

    Attributes:
        kind: its name with all arguments that must agree, for messages: ``allreduce(op=Sum)``.
        group: the ranks that take part; None for all.
        check: raises if this rank's tensors or arguments are invalid.
        combine: computes the results on this rank from the values of all ranks: for each rank, the list of its values
            followed by ``extra``. None if only ``exchange`` can.
        exchange: exchanges tensors through Horovod, and returns the results.
        gradient: returns the gradients of the floating-point tensors, given these tensors, all results and the
            gradients of the floating-point tensors' results; None if the collective is not differentiable.
        uneven: the first axis may differ between ranks.
        extra: returns further values that ``combine`` needs from each rank; called after ``check``.
        name: the user's name for it, or None.
        joinable: joined ranks need not take part.
        combines: the results depend on the values of several ranks, unlike those of a broadcast.
    """

    kind: str
    group: Group | None
    check: Callable[[Tensors], None]
    combine: Callable[[list[list[np.ndarray]]], list[np.ndarray]] | None
    exchange: Callable[[Tensors], Tensors]
    gradient: Callable[[Tensors, Tensors, Tensors], Tensors] | None
    uneven: bool = False
    extra: Callable[[], list[np.ndarray]] = list
    name: str | None = None
    joinable: bool = False
    combines: bool = True


def run(collective: Collective, values: Sequence[TensorLike]) -> list[SameKind]:
    """Run a collective on ``values``; return results of the same kind: numbers, arrays or tensors."""
    require_allowed(collective.kind)
    if collective.combines and not lone_training().is_combined:
        lone_training().add_collective(values)
    inputs: Tensors = []
    problem: Exception | None = None  # to be raised on all ranks together
    try:
        inputs = [as_tensor(x) for x in values]
        if collective.uneven:
            inputs = [_with_rows(x) for x in inputs]
        collective.check(inputs)
    except Exception as error:
        problem = error
    if not tf.executing_eagerly() or any(is_symbolic(x) for x in values):
        if problem is not None:
            raise problem
        with tf.name_scope(collective.name or "collective"):
            return _differentiable(collective, collective.exchange, inputs)
    if problem is None and record.could_possibly_record():
        results = _differentiable(collective, lambda xs: _run_eagerly(collective, xs), inputs)
    else:
        results = _run_eagerly(collective, inputs, problem)
    # An alltoall has one input and two results.
    return [result_converter(values[min(i, len(values) - 1)])(y) for i, y in enumerate(results)]


def _run_eagerly(collective: Collective, inputs: Tensors, problem: Exception | None = None) -> Results:
    """Compare the calls of all ranks, sending small values along; then exchange larger values."""
    kind = collective.kind if collective.name is None else f"{collective.kind} {collective.name!r}"
    call = Call(kind, uneven=collective.uneven, problem=problem, joinable=collective.joinable)
    if problem is None:
        call.dtypes = tuple(x.dtype.name for x in inputs)
        call.shapes = tuple(tuple(x.shape) for x in inputs)
        if collective.combine is not None and sum(_nbytes(x) for x in inputs) <= SMALL_BYTES:
            call.payload = [x.numpy() for x in inputs] + collective.extra()
    all_calls = agree_on_call(call, collective.group)
    calls = [each for each in all_calls if each.kind != JOIN]
    if collective.combine is not None and all(each.payload is not None for each in calls):
        return collective.combine([cast("list[np.ndarray]", each.payload) for each in calls])
    if collective.uneven:
        _check_size(calls, collective)
    ranks = range(cluster.size()) if collective.group is None else collective.group.ranks
    # Joined ranks wait for the next call.
    active = [rank for rank, each in zip(ranks, all_calls, strict=True) if each.kind != JOIN]
    recorded_ranks = active if collective.group is not None or len(calls) < len(all_calls) else None
    with progress.collective(str(call), recorded_ranks, sum(map(_nbytes, inputs))):
        return collective.exchange(inputs)


def _check_size(calls: Sequence[Call], collective: Collective) -> None:
    """Raise ValueError on all ranks if one of them would send or receive more elements than MPI can count."""
    counts = [[int(np.prod(shape)) for shape in call.shapes] for call in calls]
    total = max(map(sum, zip(*counts, strict=True)), default=0)
    if total <= tensors.LARGEST:
        return
    extra = gather(cluster.exchange(collective.group), f"sizes of {collective.kind}", collective.extra)
    if extra[0]:  # an alltoall: check what each rank sends, and what it receives
        inner = [math.prod(call.shapes[0][1:]) for call in calls]
        received = np.sum([splits[0] for splits in extra], axis=0) * max(inner)
        total = max(int(received.max()), *(count[0] for count in counts))
    if total > tensors.LARGEST:
        raise ValueError(
            describe(
                "x",
                f"{total:,} elements that one rank would send or receive in {collective.kind}",
                f"at most {tensors.LARGEST:,}",
                "exchange it in several parts, or reinterpret it in a wider dtype",
            )
        )


def _differentiable(collective: Collective, forward: Callable[[Tensors], Results], inputs: Tensors) -> Tensors:
    """Return ``forward(inputs)`` with the collective's own gradient.

    Inside :func:`share_of_batch`, the loss of rank s has weight f_s, so each rank multiplies the gradients that it
    sends by its factor. The received gradients are divided by this rank's f_r, because gradients computed from them
    are multiplied by f_r when they leave this rank.
    """
    factor = gradient_factor()

    @tf.custom_gradient
    def call(*xs: tf.Tensor) -> tuple[Tensors, Callable[..., Tensors]]:
        results = [tf.convert_to_tensor(y) for y in forward(list(xs))]

        def gradient(*upstream: tf.Tensor) -> Tensors:
            if collective.gradient is None:
                raise LookupError(f"{collective.kind} has no gradient; use another op, or tf.stop_gradient(x)")
            floats = [i for i, x in enumerate(xs) if x.dtype.is_floating]
            floating = [xs[i] for i in floats]
            dys = [tf.convert_to_tensor(upstream[i]) for i in floats]  # tf.gather of a result has IndexedSlices
            if factor is None:
                return _with_none(collective.gradient(floating, results, dys), xs)
            checked = without_outer_tape(factor, "x", collective.kind)
            with tf.control_dependencies([_assert_rows(collective, checked, floating)]):
                grads = collective.gradient(floating, results, [times_share(dy, checked) for dy in dys])
            return _with_none([tf.math.divide_no_nan(dx, tf.cast(checked, dx.dtype)) for dx in grads], xs)

        return results, gradient

    return list(call(*inputs))


def _with_none(grads: Tensors, xs: Sequence[tf.Tensor]) -> Tensors:
    """Expand the gradients of the floating-point tensors to all tensors, with None for the others."""
    remaining = iter(grads)
    return [next(remaining) if x.dtype.is_floating else None for x in xs]


def _assert_rows(collective: Collective, factor: tf.Tensor, xs: Tensors) -> tf.Operation | None:
    """Assert that this rank has rows of the global batch, or has contributed nothing."""
    is_right = tf.logical_or(factor > 0, tf.equal(tf.add_n([tf.size(x) for x in xs]), 0))
    got = f"{collective.kind} with a gradient, in a batch of fewer rows than ranks"
    expected = "rows on every rank"
    return tf.debugging.Assert(is_right, [describe("x", got, expected, "leave the last batch out (drop_remainder)")])


def _with_rows(x: tf.Tensor) -> tf.Tensor:
    """Return ``x``; reshape a scalar to one row."""
    if x.shape.rank is None:
        return tf.cond(tf.equal(tf.rank(x), 0), lambda: tf.reshape(x, [1]), lambda: x)
    return tf.reshape(x, [1]) if x.shape.rank == 0 else x


def _nbytes(x: tf.Tensor) -> int:
    return int(math.prod(x.shape) * x.dtype.size)
