"""The collectives as people call them: numbers, NumPy arrays and tensors, eager or inside ``tf.function``.

Every rank calls the same collective in the same order, from one thread. In eager mode the ranks first compare
their calls (see :mod:`hvdkit.collectives.agreement`), so that unlike tensors are an error on every rank; inside a
graph Horovod's own negotiation reports them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.progress import collective
from hvdkit.collectives import local, tensors
from hvdkit.collectives.agreement import SMALL_BYTES, Call, agree, attempt, check_root
from hvdkit.collectives.ops import Average, ReduceOp, checked_op, op_label
from hvdkit.collectives.splits import checked_splits, even_splits, fitting_splits
from hvdkit.collectives.values import as_tensor, graph_safe, is_symbolic, like
from hvdkit.errors import describe


@graph_safe
def allreduce(x: Any, op: ReduceOp = Average) -> Any:
    """Reduce ``x`` over all ranks; every rank gets the result.

    Args:
        x: number, array or tensor; shape and dtype equal on every rank. All dtypes of numbers but complex;
            bfloat16 travels as float32, small integers as int32.
        op: ``hk.Average``, ``hk.Sum``, ``hk.Min`` or ``hk.Max``. The average of integers is rounded toward zero.

    Returns:
        The same kind, shape and dtype as ``x``.

    Raises:
        TypeError: ``x`` holds no numbers that ``op`` can reduce.
        CollectiveMismatchError: ranks called different collectives, or with unlike tensors.

    Example::

        hk.allreduce(hk.rank(), op=hk.Sum)  # on 4 ranks
        # 6
    """
    return grouped_allreduce([x], op)[0]


@graph_safe
def grouped_allreduce(xs: Sequence[Any], op: ReduceOp = Average) -> list[Any]:
    """Reduce several values over all ranks, those of one dtype in a single exchange.

    Args:
        xs: numbers, arrays or tensors; number, shapes and dtypes equal on every rank.
        op: as for :func:`allreduce`.

    Returns:
        The results, in the order of ``xs``.

    Raises:
        TypeError, CollectiveMismatchError: as for :func:`allreduce`.

    Example::

        loss, accuracy = hk.grouped_allreduce([loss, accuracy])
    """
    values = list(xs)

    def check(given: list[tf.Tensor]) -> None:
        for x in given:
            tensors.wire_dtype(x.dtype, checked_op(op))

    return _run(
        f"allreduce(op={op_label(op)})",
        values,
        check=check,
        here=lambda parts: [local.reduce(list(p), checked_op(op)) for p in zip(*parts, strict=True)],
        wire=lambda given: tensors.grouped_allreduce(given, checked_op(op), "hvdkit.allreduce"),
    )


@graph_safe
def allgather(x: Any) -> Any:
    """Concatenate ``x`` of all ranks along the first axis, in rank order; every rank gets the result.

    Args:
        x: array or tensor of any dtype of numbers or bool; the first axis may differ between ranks and be empty.
            A single number counts as one row.

    Returns:
        The same kind and dtype as ``x``; first axis: the sum of all ranks' first axes.

    Raises:
        TypeError, CollectiveMismatchError: as for :func:`allreduce`.

    Example::

        hk.allgather(np.full(hk.rank(), hk.rank()))  # on 3 ranks
        # array([1, 2, 2])
    """
    return _run(
        "allgather",
        [x],
        uneven=True,
        check=lambda given: tensors.check_movable(given[0].dtype),
        here=lambda parts: [np.concatenate([p[0] for p in parts])],
        wire=lambda given: [tensors.allgather(given[0], "hvdkit.allgather")],
    )[0]


@graph_safe
def broadcast(x: Any, root: int = 0) -> Any:
    """Return rank ``root``'s ``x`` on every rank.

    Args:
        x: number, array or tensor; shape and dtype equal on every rank.
        root: the rank whose value counts.

    Returns:
        The same kind, shape and dtype as ``x``.

    Raises:
        ValueError: ``root`` is no rank.
        TypeError, CollectiveMismatchError: as for :func:`allreduce`.

    Example::

        seed = hk.broadcast(np.random.randint(2**31))
    """

    def check(given: list[tf.Tensor]) -> None:
        check_root(root)
        tensors.check_movable(given[0].dtype)

    return _run(
        f"broadcast(root={root})",
        [x],
        check=check,
        here=lambda parts: [parts[root][0]],
        wire=lambda given: [tensors.broadcast(given[0], root, "hvdkit.broadcast")],
    )[0]


@graph_safe
def alltoall(x: Any, splits: Any = None) -> Any:
    """Send the first ``splits[0]`` rows of ``x`` to rank 0, the next ``splits[1]`` rows to rank 1, and so on.

    Args:
        x: array or tensor; axes after the first equal on every rank.
        splits: row counts, one for each rank, adding up to the rows of ``x``; they may be 0 and differ between
            ranks. Default: equal parts, and then the rows must be a multiple of the number of ranks.

    Returns:
        The rows received, in rank order of their senders. With ``splits`` given, a pair of those rows and an
        int32 array of how many came from each rank (as Horovod's alltoall does).

    Raises:
        ValueError: ``splits`` does not fit ``x``; the other ranks get CollectiveMismatchError.
        TypeError, CollectiveMismatchError: as for :func:`allreduce`.

    Example::

        rows, counts = hk.alltoall(ids, splits=np.bincount(ids % hk.size(), minlength=hk.size()))
    """
    size, rank = cluster.size(), cluster.rank()
    if (splits is not None and is_symbolic(splits)) or is_symbolic(x):
        given = as_tensor(x)
        counts = (
            even_splits(tf.shape(given)[0], size)
            if splits is None
            else fitting_splits(splits, tf.shape(given)[0], size)
        )
        received, received_splits = tensors.alltoall(given, counts, "hvdkit.alltoall")
        return received if splits is None else (received, received_splits)
    counts_here: list[np.ndarray] = [np.zeros(size, np.int64)]

    def check(given: list[tf.Tensor]) -> None:
        tensors.check_movable(given[0].dtype)
        counts_here[0] = checked_splits(splits, int(given[0].shape[0]), size)

    def here(parts: list[list[np.ndarray]]) -> list[np.ndarray]:
        return list(local.exchange_rows([p[0] for p in parts], [p[1] for p in parts], rank))

    def wire(given: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(tensors.alltoall(given[0], tf.constant(counts_here[0], tf.int32), "hvdkit.alltoall"))

    received, received_splits = _run(
        "alltoall", [x], uneven=True, check=check, extra=lambda: counts_here[0], here=here, wire=wire
    )
    return received if splits is None else (received, like(x)(received_splits))


@graph_safe
def reducescatter(x: Any, op: ReduceOp = Average) -> Any:
    """Reduce ``x`` over all ranks and give each rank its part of the rows.

    Args:
        x: array or tensor with at least one axis; shape and dtype equal on every rank.
        op: ``hk.Average`` or ``hk.Sum``.

    Returns:
        Rows ``r*k`` to ``(r+1)*k`` of the reduced array on rank r, with ``k = rows / size``; where that leaves a
        rest, the first ``rows % size`` ranks get one row more. The same kind and dtype as ``x``.

    Raises:
        ValueError: ``op`` is another, or ``x`` has no axis.
        TypeError, CollectiveMismatchError: as for :func:`allreduce`.

    Example::

        hk.reducescatter(np.arange(4.0), op=hk.Sum)  # on 2 ranks; rank 1
        # array([4., 6.])
    """

    def check(given: list[tf.Tensor]) -> None:
        if checked_op(op) not in (ReduceOp.Average, ReduceOp.Sum):
            raise ValueError(
                describe("op", checked_op(op).name, "hk.Average or hk.Sum", "use hk.allreduce and slice its result")
            )
        if given[0].shape.rank == 0:
            raise ValueError(describe("x", "a single number", "at least one axis", "use hk.allreduce"))
        tensors.wire_dtype(given[0].dtype, checked_op(op))

    def here(parts: list[list[np.ndarray]]) -> list[np.ndarray]:
        start, end = local.scatter_bounds(len(parts[0][0]), cluster.size(), cluster.rank())
        return [local.reduce([p[0] for p in parts], checked_op(op))[start:end]]

    return _run(
        f"reducescatter(op={op_label(op)})",
        [x],
        check=check,
        here=here,
        wire=lambda given: [tensors.reducescatter(given[0], checked_op(op), "hvdkit.reducescatter")],
    )[0]


def barrier() -> None:
    """Wait until every rank has called barrier.

    Raises:
        CollectiveMismatchError: a rank called another collective instead.
        ClusterError: a rank left the job.
    """
    agree(Call("barrier()"))


def broadcast_object(obj: Any, root: int = 0) -> Any:
    """Return rank ``root``'s picklable ``obj`` on every rank.

    Raises:
        ValueError: ``root`` is no rank.
        TypeError: ``obj`` cannot be pickled on ``root``.
        CollectiveMismatchError: a rank called another collective instead, or its arguments were bad.

    Example::

        run_name = hk.broadcast_object(make_name() if hk.is_chief() else None)
    """
    call = Call(f"broadcast_object(root={root})")

    def prepare() -> None:
        check_root(root)
        call.payload = _pickled(obj) if cluster.rank() == root else None

    call.problem = attempt(prepare)
    return pickle.loads(agree(call)[root].payload)


def allgather_object(obj: Any) -> list[Any]:
    """Return the picklable ``obj`` of every rank, in rank order.

    Raises:
        TypeError: ``obj`` cannot be pickled.
        CollectiveMismatchError: a rank called another collective instead, or its ``obj`` cannot be pickled.

    Example::

        hk.allgather_object(hk.rank())  # on 3 ranks
        # [0, 1, 2]
    """
    call = Call("allgather_object()")

    def prepare() -> None:
        call.payload = _pickled(obj)

    call.problem = attempt(prepare)
    return [pickle.loads(other.payload) for other in agree(call)]


def _pickled(obj: Any) -> bytes:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        got = f"{type(obj).__name__} ({error})"
        raise TypeError(describe("obj", got, "an object that can be pickled", "send its numbers or strings")) from error


def _run(
    kind: str,
    values: list[Any],
    *,
    here: Callable[[list[list[np.ndarray]]], list[np.ndarray]],
    wire: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    check: Callable[[list[tf.Tensor]], None] = lambda _: None,
    extra: Callable[[], np.ndarray] | None = None,
    uneven: bool = False,
) -> list[Any]:
    """Run one collective: straight to Horovod in a graph; in eager mode after agreement, small values at once."""
    given: list[tf.Tensor] = []

    def prepare() -> None:
        given.extend(as_tensor(x) for x in values)
        if uneven:
            given[:] = [tf.reshape(x, [1]) if x.shape.rank == 0 else x for x in given]
        check(given)

    if any(is_symbolic(x) for x in values) or not tf.executing_eagerly():
        prepare()
        return wire(given)
    problem = attempt(prepare)
    call = Call(kind, uneven=uneven, problem=problem)
    if problem is None:
        call.dtypes = tuple(x.dtype.name for x in given)
        call.shapes = tuple(tuple(x.shape) for x in given)
        if sum(int(np.prod(x.shape)) * x.dtype.size for x in given) <= SMALL_BYTES:
            call.payload = [x.numpy() for x in given] + ([extra()] if extra else [])
    calls = agree(call)
    everything_here = all(c.payload is not None for c in calls)
    if everything_here:
        results: list[Any] = here([c.payload for c in calls])
    else:
        with collective(str(call)):
            results = wire(given)
    return [like(values[min(i, len(values) - 1)])(y) for i, y in enumerate(results)]
