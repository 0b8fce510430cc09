"""Runs one call of a collective: as part of a graph, or eagerly after the ranks have compared their calls.

In both cases the result has the collective's derivative, at every size and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record

from hvdkit import cluster
from hvdkit.cluster import Group
from hvdkit.cluster.agreement import gather
from hvdkit.cluster.progress import collective
from hvdkit.collectives import tensors
from hvdkit.collectives.batch_share import current_factor, times_share
from hvdkit.collectives.call_checks import JOIN, SMALL_BYTES, Call, agree_on_call, attempt
from hvdkit.collectives.conversion import as_tensor, is_symbolic, like
from hvdkit.errors import HvdkitError, describe

Tensors = list[tf.Tensor]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective with its arguments.

    Attributes:
        kind: its name with all arguments that must agree, for messages: ``allreduce(op=Sum)``.
        group: the ranks that take part; None for all.
        check: raises if this rank's tensors or arguments are invalid.
        here: computes the results locally from the values of all ranks: for each rank, the list of its values followed
            by ``extra``. None if only ``wire`` can.
        wire: exchanges tensors, and returns the results.
        derivative: returns the gradients of the tensors, given the tensors, the results and the gradients of the
            results; None if the collective is not differentiable.
        uneven: the first axis may differ between ranks.
        extra: returns further values that ``here`` needs from each rank; called after ``check``.
        name: the user's name for it, or None.
        joinable: joined ranks need not take part.
    """

    kind: str
    group: Group | None
    check: Callable[[Tensors], None]
    here: Callable[[list[list[np.ndarray]]], list[np.ndarray]] | None
    wire: Callable[[Tensors], Tensors]
    derivative: Callable[[Tensors, Tensors, Tensors], Tensors] | None
    uneven: bool = False
    extra: Callable[[], list[np.ndarray]] = list
    name: str | None = None
    joinable: bool = False


def run(asked: Collective, values: Sequence[Any]) -> list[Any]:
    """Run a collective on ``values``; return results of the same kind: numbers, arrays or tensors."""
    given: Tensors = []

    def prepare() -> None:
        given.extend(as_tensor(x) for x in values)
        if asked.uneven:
            given[:] = [_with_rows(x) for x in given]
        asked.check(given)

    problem = attempt(prepare)
    if not tf.executing_eagerly() or any(is_symbolic(x) for x in values):
        if problem is not None:
            raise problem
        with tf.name_scope(asked.name or "collective"):
            return _differentiable(asked, asked.wire, given)
    if problem is None and record.could_possibly_record():
        results = _differentiable(asked, lambda xs: _run_eagerly(asked, xs), given)
    else:
        results = _run_eagerly(asked, given, problem)
    return [like(values[min(i, len(values) - 1)])(y) for i, y in enumerate(results)]


def _run_eagerly(asked: Collective, given: Tensors, problem: Exception | None = None) -> list[Any]:
    """Compare the calls of all ranks, sending small values along; then exchange larger values."""
    kind = asked.kind if asked.name is None else f"{asked.kind} {asked.name!r}"
    call = Call(kind, uneven=asked.uneven, problem=problem, joinable=asked.joinable)
    if problem is None:
        call.dtypes = tuple(x.dtype.name for x in given)
        call.shapes = tuple(tuple(x.shape) for x in given)
        if asked.here is not None and sum(_nbytes(x) for x in given) <= SMALL_BYTES:
            call.payload = [x.numpy() for x in given] + asked.extra()
    everywhere = agree_on_call(call, asked.group)
    calls = [one for one in everywhere if one.kind != JOIN]
    if asked.here is not None and all(c.payload is not None for c in calls):
        return asked.here([c.payload for c in calls])
    if asked.uneven:
        _check_size(calls, asked)
    ranks = range(cluster.size()) if asked.group is None else asked.group.ranks
    # Joined ranks wait for the next call.
    active = [rank for rank, one in zip(ranks, everywhere, strict=True) if one.kind != JOIN]
    among = active if asked.group is not None or len(calls) < len(everywhere) else None
    with collective(str(call), among, sum(map(_nbytes, given))):
        return asked.wire(given)


def _check_size(calls: Sequence[Call], asked: Collective) -> None:
    """Raise ValueError on all ranks if one of them would send or receive more elements than MPI can count."""
    counts = [[int(np.prod(shape)) for shape in call.shapes] for call in calls]
    total = max(map(sum, zip(*counts, strict=True)), default=0)
    if total <= tensors.LARGEST:
        return
    extra = gather(cluster.exchange(asked.group), f"sizes of {asked.kind}", asked.extra)
    if extra[0]:  # an alltoall: check what each rank sends, and what it receives
        inner = [math.prod(call.shapes[0][1:]) for call in calls]
        received = np.sum([splits[0] for splits in extra], axis=0) * max(inner)
        total = max(int(received.max()), *(count[0] for count in counts))
    if total > tensors.LARGEST:
        raise ValueError(
            describe(
                "x",
                f"{total:,} elements that one rank would send or receive in {asked.kind}",
                f"at most {tensors.LARGEST:,}",
                "exchange it in several parts, or reinterpret it in a wider dtype",
            )
        )


def _differentiable(asked: Collective, forward: Callable[[Tensors], list[Any]], given: Tensors) -> Tensors:
    """Return ``forward(given)`` with the collective's own derivative.

    Inside :func:`share_of_batch`, the loss of rank s has weight f_s, so each rank multiplies the gradients that it
    sends by its factor. The received gradients are divided by this rank's f_r, because gradients computed from them
    are multiplied by f_r when they leave this rank.
    """
    factor = current_factor()

    @tf.custom_gradient
    def call(*xs: tf.Tensor) -> tuple[Tensors, Callable[..., Tensors]]:
        inputs = list(xs)
        results = [tf.convert_to_tensor(y) for y in forward(inputs)]

        def gradient(*upstream: tf.Tensor) -> Tensors:
            if asked.derivative is None:
                raise LookupError(f"{asked.kind} has no gradient; use another op, or tf.stop_gradient(x)")
            if factor is None:
                return asked.derivative(inputs, results, list(upstream))
            if record.could_possibly_record():  # an outer tape: it is unknown which loss is weighted
                got = f"a gradient of a gradient of {asked.kind}, with batches that ranks divide unevenly"
                remedy = "choose a batch size that the number of ranks divides, and drop the remainder"
                raise HvdkitError(describe("x", got, "batches that divide evenly", remedy))
            with tf.control_dependencies([_has_rows(asked, factor)]):
                found = asked.derivative(inputs, results, [times_share(dy, factor) for dy in upstream])
            return [None if dx is None else tf.math.divide_no_nan(dx, tf.cast(factor, dx.dtype)) for dx in found]

        return results, gradient

    return list(call(*given))


def _has_rows(asked: Collective, factor: tf.Tensor) -> Any:
    """Assert that this rank has rows of the global batch, so that its values took part."""
    got, expected = f"{asked.kind} with a gradient, in a batch of fewer rows than ranks", "rows on every rank"
    return tf.debugging.Assert(factor > 0, [describe("x", got, expected, "leave the last batch out (drop_remainder)")])


def _with_rows(x: tf.Tensor) -> tf.Tensor:
    """Return ``x``; reshape a scalar to one row."""
    if x.shape.rank is None:
        return tf.cond(tf.equal(tf.rank(x), 0), lambda: tf.reshape(x, [1]), lambda: x)
    return tf.reshape(x, [1]) if x.shape.rank == 0 else x


def _nbytes(x: tf.Tensor) -> int:
    return math.prod(x.shape) * x.dtype.size
