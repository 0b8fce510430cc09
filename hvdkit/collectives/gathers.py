"""Collectives that move values: allgather and alltoall, for numbers, NumPy arrays and tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import dtypes, numpy_collectives, tensors
from hvdkit.collectives.batch_share import current_factor, record_gathered_rows, row_ratio, within_share
from hvdkit.collectives.calls import Collective, Tensors, run
from hvdkit.collectives.conversion import SameKind, TensorLike, as_tensor, graph_safe, result_converter
from hvdkit.collectives.process_sets import RankGroup, describe_group, resolve
from hvdkit.errors import HvdkitError, describe


@graph_safe
def allgather(
    x: TensorLike, *, process_set: RankGroup = None, group: RankGroup = None, name: str | None = None
) -> SameKind:
    """Concatenate ``x`` of all ranks along the first axis, in rank order; every rank gets the result.

    The gradient of this rank's ``x`` is the sum over all ranks of the gradients of its rows.

    Args:
        x: array or tensor ``[rows, ...]`` of any numeric dtype or bool; ``rows`` may differ between ranks and be 0. A
            scalar counts as one row.
        process_set: the ranks that take part, an ``hk.ProcessSet`` or an axis of the mesh; default: all.
        group: alias of ``process_set``.
        name: shown in messages and profiles; must be equal on every rank.

    Returns:
        ``[sum of all ranks' rows, ...]``, the same kind and dtype as ``x``.

    Raises:
        TypeError: ``x`` is not numeric.
        ValueError: ``process_set`` does not contain this rank.
        CollectiveMismatchError: ranks called different collectives, or passed incompatible tensors.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> rows = hk.allgather(np.full((hk.rank() + 1, 8), hk.rank()))  # rank 0 has 1 row, rank 1 has 2, ...
        >>> rows.shape == (sum(range(1, hk.size() + 1)), 8)
        True
        >>> rows[:, 0].tolist() == [rank for rank in range(hk.size()) for _ in range(rank + 1)]
        True
    """
    return grouped_allgather([x], process_set=process_set, group=group, name=name)[0]


@graph_safe
def grouped_allgather(
    xs: Sequence[TensorLike], *, process_set: RankGroup = None, group: RankGroup = None, name: str | None = None
) -> list[SameKind]:
    """Gather several values like ``hk.allgather``, with a single comparison of the ranks' calls.

    Args:
        xs: arrays or tensors. Their number, dtypes, and shapes after the first axis must be equal on every rank.
        process_set: as for ``hk.allgather``.
        group: as for ``hk.allgather``.
        name: as for ``hk.allgather``.

    Returns:
        The results, in the order of ``xs``.

    Raises:
        TypeError, ValueError, CollectiveMismatchError: as for ``hk.allgather``.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> labels, scores = np.zeros(2, "int32"), np.zeros((2, 10), "float32")  # this rank's
        >>> labels, scores = hk.grouped_allgather([labels, scores])
        >>> labels.shape == (2 * hk.size(),), scores.shape == (2 * hk.size(), 10)
        (True, True)
    """
    members = resolve(process_set, group)
    return gather_as(f"allgather({describe_group(members)})" if members else "allgather", xs, members, name)


def gather_as(
    kind: str,
    xs: Sequence[TensorLike],
    members: cluster.Group | None,
    name: str | None,
    check: Callable[[], object] = lambda: None,
) -> list[SameKind]:
    """Gather several values for a collective ``kind``; ``check`` raises if its other arguments are invalid."""

    def check_all(inputs: Tensors) -> None:
        check()
        for x in inputs:
            dtypes.check_movable(x.dtype)

    collective = Collective(
        kind=kind,
        group=members,
        check=check_all,
        combine=lambda values: [np.concatenate(each) for each in zip(*values, strict=True)],
        exchange=lambda inputs: tensors.compared_allgather(inputs, tensors.PUBLIC, members),
        gradient=lambda xs, ys, dys: [_gradient_of_rows(x, dy, members) for x, dy in zip(xs, dys, strict=True)],
        uneven=True,
        name=name,
    )
    return run(collective, list(xs))


def _gradient_of_rows(x: tf.Tensor, dy: tf.Tensor, members: cluster.Group | None) -> tf.Tensor:
    """Return the sum over all ranks of the gradients of this rank's rows. Each rank sends them to the rows' owner."""
    counts = allgather(tf.reshape(tf.shape(x)[0], [1]), process_set=members)
    received, _ = alltoall(dy, counts, process_set=members)
    wide = received.dtype if received.dtype.size > 2 else tf.float32
    blocks = tf.reshape(tf.cast(received, wide), tf.concat([[tf.size(counts)], tf.shape(x)], axis=0))
    return tf.cast(tf.reduce_sum(blocks, axis=0), x.dtype)


@graph_safe
def gather_rows(
    x: TensorLike, *, process_set: RankGroup = None, group: RankGroup = None, name: str | None = None
) -> SameKind:
    """Concatenate the rows of all ranks in rank order; each rank contributes the gradient of its own rows.

    For losses and layers that compare the rows of a batch with each other.

    - In ``hk.fit``, the gradient is that of one process, whether each rank computes the same loss of all rows or the
      losses of its own rows. It is collected from all ranks, as by ``hk.allgather``, and scaled for optimizers that
      average the ranks' gradients by rows. The rows are those of the global batch, in its order; a rank with an empty
      share of the batch adds none.
    - In other loops, every rank must compute the same loss of all rows. The gradient is that of this rank's rows, takes
      no exchange, and is not scaled: sum the ranks' gradients, e.g. ``hk.DistributedOptimizer(op=hk.Sum)``. If each
      rank computes the loss of its own rows only, use ``hk.allgather``, and average the gradients.

    Source: the chain rule. With L the loss of all rows Y, dL/dw = sum over ranks of (dL/dY_own dY_own/dw).

    Args:
        x: array or tensor ``[rows, ...]`` of any numeric dtype or bool; ``rows`` may differ between ranks and be 0.
        process_set: the ranks that take part, an ``hk.ProcessSet`` or an axis of the mesh; default: all ranks that have
            different rows.
        group: alias of ``process_set``.
        name: shown in messages and profiles; must be equal on every rank.

    Returns:
        ``[sum of all ranks' rows, ...]``, the same kind and dtype as ``x``, the same on every rank.

    Raises:
        TypeError, ValueError, CollectiveMismatchError: as for ``hk.allgather``.
        HvdkitError: in ``hk.fit``, ``process_set`` is not the set of all ranks that have different rows.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> own = tf.ones([2, 3])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(own)
        ...     rows = hk.gather_rows(own)
        ...     loss = tf.reduce_sum(rows**2)
        >>> rows.shape[0] == 2 * hk.size()
        True
        >>> tape.gradient(loss, own)[0].numpy().tolist()  # of this rank's rows
        [2.0, 2.0, 2.0]
    """
    members = resolve(process_set, group) or cluster.data_group()
    if not isinstance(x, tf.Tensor | tf.Variable) and not hasattr(x, "value"):
        return allgather(x, process_set=members, name=name)
    own = as_tensor(x)
    own = own[None] if own.shape.rank == 0 else own
    if not within_share():
        return gather_all_rows([own], members, name)[0][0]
    _require_all_rows(members)
    rows = grouped_allgather([_without_placeholder(own)], process_set=members, name=name)[0]
    record_gathered_rows(tf.shape(rows)[0])
    return rows


def gather_all_rows(
    xs: Sequence[tf.Tensor], members: cluster.Group | None = None, name: str | None = None
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Gather several ``[rows, ...]``, in one exchange; every rank must compute the same loss of all rows.

    The gradient of this rank's rows takes no exchange.

    Returns:
        The rows of all ranks; and for each tensor the number of rows before this rank's, int32 ``[len(xs)]``.
    """
    members = members or cluster.data_group()
    _require_all_rows(members)
    present = [_without_placeholder(x) for x in xs]
    counts = tf.stack([tf.shape(x)[0] for x in present])[None]
    inputs = [*map(tf.stop_gradient, present), counts]
    *gathered, counts = grouped_allgather(inputs, process_set=members, name=name)
    index = cluster.rank() if members is None else members.index
    starts = tf.reduce_sum(counts[:index], axis=0)
    record_gathered_rows(tf.reduce_sum(counts[:, 0]))
    results = [
        _with_gradient_of(own, rows, starts[number]) if own.dtype.is_floating else rows
        for number, (own, rows) in enumerate(zip(present, gathered, strict=True))
    ]
    return results, starts


def _require_all_rows(members: cluster.Group | None) -> None:
    """Raise unless a step of ``hk.fit`` gathers from all ranks that have different rows."""
    number = cluster.size() if members is None else members.size
    if within_share() and number != cluster.group(cluster.DATA).size:
        expected = "all ranks that have different rows, whose gradients hk.fit averages"
        raise HvdkitError(describe("process_set", f"{number} ranks in hk.fit", expected, "leave it out"))


def _without_placeholder(x: tf.Tensor) -> tf.Tensor:
    """Return ``x``; without rows if the share is empty, whose step gets the batch's first row with weight 0."""
    factor = current_factor()
    return x if factor is None else x[: tf.where(tf.equal(factor, 0), 0, tf.shape(x)[0])]


def _with_gradient_of(own: tf.Tensor, gathered: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """Return ``gathered`` with a gradient for its rows ``own``, which begin at ``start``."""
    ratio = row_ratio() if within_share() else None

    @tf.custom_gradient
    def put(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            rows = tf.convert_to_tensor(dy)[start : start + tf.shape(own)[0]]
            return rows if ratio is None else rows * tf.cast(ratio, rows.dtype)

        return tf.identity(gathered), gradient

    return put(own)


@graph_safe
def alltoall(
    x: TensorLike,
    splits: npt.ArrayLike | tf.Tensor | None = None,
    *,
    process_set: RankGroup = None,
    group: RankGroup = None,
    name: str | None = None,
) -> SameKind:
    """Send the first ``splits[0]`` rows of ``x`` to rank 0, the next ``splits[1]`` rows to rank 1, and so on.

    The gradient of each row is returned from the rank that received it.

    Args:
        x: array or tensor ``[rows, ...]``; axes after the first must be equal on every rank.
        splits: integers ``[N]``: a row count for each of the N ranks, with the number of rows of ``x`` as their sum.
            They may be 0 and differ between ranks. Default: equal parts; then the rows must be a multiple of N.
        process_set: as for ``hk.allgather``.
        group: as for ``hk.allgather``.
        name: as for ``hk.allgather``.

    Returns:
        The received rows, in rank order of their senders. If ``splits`` is given, a pair of the rows and an int32 array
            with the number of rows from each rank (as in Horovod).

    Raises:
        ValueError: ``splits`` does not fit ``x``; the other ranks get CollectiveMismatchError. If the splits are known
            only when a graph runs, every rank raises ``tf.errors.OpError``.
        TypeError, CollectiveMismatchError: as for ``hk.allgather``.

    Examples:
        Send each id to the rank ``id % size``:

        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> ids = np.arange(12)
        >>> owner = ids % hk.size()
        >>> by_owner = ids[np.argsort(owner, kind="stable")]
        >>> received, counts = hk.alltoall(by_owner, splits=np.bincount(owner, minlength=hk.size()))
        >>> set(received % hk.size()) == {hk.rank()}, counts.shape == (hk.size(),)
        (True, True)
    """
    members = resolve(process_set, group)
    size = cluster.size() if members is None else members.size
    index = cluster.rank() if members is None else members.index
    checked: list[_Splits] = []  # set by ``check``

    def check(inputs: Tensors) -> None:
        dtypes.check_movable(inputs[0].dtype)
        checked.append(_splits_of(inputs[0], splits, size))

    def combine(values: list[list[np.ndarray]]) -> list[np.ndarray]:
        rows, row_counts = zip(*values, strict=True)
        return list(numpy_collectives.exchange_rows(rows, row_counts, index))

    def exchange(inputs: Tensors) -> Tensors:
        counts, are_valid = checked[0]
        if are_valid is None:
            return list(tensors.alltoall(inputs[0], counts, tensors.PUBLIC, members))
        return list(tensors.compared_alltoall(inputs[0], counts, are_valid, tensors.PUBLIC, members))

    collective = Collective(
        kind=f"alltoall({describe_group(members)})" if members else "alltoall",
        group=members,
        check=check,
        combine=combine,
        exchange=exchange,
        gradient=lambda xs, ys, dys: [alltoall(dy, ys[1], process_set=members)[0] for dy in dys],
        uneven=True,
        extra=lambda: [checked[0].counts.numpy()],
        name=name,
    )
    received, received_splits = run(collective, [x])
    return received if splits is None else (received, result_converter(x)(received_splits))


class _Splits(NamedTuple):
    """The splits of an alltoall as a tensor, and whether they match; None if that is already known."""

    counts: tf.Tensor
    are_valid: tf.Tensor | None = None


def _splits_of(x: tf.Tensor, splits: npt.ArrayLike | tf.Tensor | None, size: int) -> _Splits:
    """Return the splits of ``x``, which are known when a graph is built, or only when it runs.

    Raises:
        ValueError: they do not match ``x``; not while a graph is built.
        TypeError: as for :func:`_splits_in_graph`.
    """
    if tf.executing_eagerly():
        return _Splits(tf.constant(_checked_splits(splits, x.shape[0], size), tf.int32))
    rows: int | None = x.shape[0] if x.shape.rank is not None else None
    static = splits if splits is None else tf.get_static_value(as_tensor(splits))
    if rows is not None and (splits is None or static is not None):
        with contextlib.suppress(ValueError):
            return _Splits(tf.constant(_checked_splits(static, rows, size), tf.int32))
    return _Splits(*_splits_in_graph(splits, tf.shape(x)[0], size))


def _checked_splits(splits: npt.ArrayLike | tf.Tensor | None, rows: int, size: int) -> np.ndarray:
    """Return ``splits`` as an integer array. Raises ValueError if they do not match ``rows`` and ``size``."""
    if splits is None:
        if rows % size:
            raise ValueError(
                describe("x", f"{rows} rows", f"a multiple of the {size} ranks where splits is None", "pass splits")
            )
        return np.full(size, rows // size)
    counts = np.asarray(splits)
    are_counts = counts.shape == (size,) and counts.dtype.kind in "iu" and (counts >= 0).all()
    if not are_counts or counts.sum() != rows:
        expected = f"{tensors.SPLITS} ({size} ranks, {rows} rows)"
        raise ValueError(describe("splits", counts.tolist(), expected, "count the rows for each rank"))
    return counts.astype(np.int64)


def _splits_in_graph(
    splits: npt.ArrayLike | tf.Tensor | None, rows: tf.Tensor, size: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return ``splits`` (None: equal ones) and whether they match ``rows``, as tensors evaluated when the graph runs.

    Raises:
        TypeError: ``splits`` are not integers.
    """
    if splits is None:
        return tf.fill([size], rows // size), rows % size == 0
    counts = as_tensor(splits)
    if not counts.dtype.is_integer:
        raise TypeError(describe("splits", f"dtype {counts.dtype.name}", tensors.SPLITS, "cast it to tf.int32"))
    counts = tf.cast(counts, tf.int64)
    are_valid = (
        (tf.size(counts) == size) & tf.reduce_all(counts >= 0) & (tf.reduce_sum(counts) == tf.cast(rows, tf.int64))
    )
    return tf.cast(counts, tf.int32), are_valid
