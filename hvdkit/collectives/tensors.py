"""TensorFlow tensors through Horovod: one function per collective, for eager mode and graphs.

:mod:`hvdkit.collectives.dtypes` defines the wire dtypes.

Horovod matches collectives by name, and compares kind, dtype, shape, root and reduction of matching ones. So names in
graphs depend only on the function and the order in it, and properties that Horovod does not compare are encoded in the
shape. A difference then raises on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import dtypes
from hvdkit.collectives.graphs import run_collective
from hvdkit.collectives.ops import ReduceOp

# Collectives called by users share one name, so that Horovod also compares their kinds.
PUBLIC = "hvdkit.collective"
# A number is encoded as that many axes of size 1, modulo this: TensorFlow's tensors have at most 254 axes.
_MOST_ONES = 64
# MPI counts the elements of a message with a C int.
LARGEST = 2**31 - 1
# An axis length that no tensor has. A rank whose splits do not match its rows sends it, so that the others raise, too.
BAD_SPLITS = 2_000_000_011
SPLITS = "one non-negative row count for each rank, adding up to the rows of x"


def grouped_allreduce(
    tensors: Sequence[tf.Tensor], op: ReduceOp, name: str, group: cluster.Group | None = None
) -> list[tf.Tensor]:
    """Reduce every tensor over all ranks (or ``group``), with one exchange per wire dtype."""
    results: list[Any] = [None] * len(tensors)
    for number, (dtype, places) in enumerate(_by_wire_dtype(tensors, op)):
        sent = [_Reduced(tensors[i], dtype, op, _size(group)) for i in places]
        reduced = _allreduce([x.sent for x in sent], op, f"{name}.{number}" if number else name, group)
        for i, x, y in zip(places, sent, reduced, strict=True):
            results[i] = x.result(y)
    return results


def compared_allreduce(
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    name: str,
    group: cluster.Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[tf.Tensor]:
    """Run :func:`grouped_allreduce`; if ranks differ in the number of tensors, raise on all of them.

    Several tensors are sent as one vector. The number of leading axes of size 1 encodes the number of tensors, and a
    trailing one encodes Average.
    """
    results: list[Any] = [None] * len(tensors)
    before: list[tf.Tensor] = []
    for number, (dtype, places) in enumerate(_by_wire_dtype(tensors, op)):
        sent = [_Reduced(tensors[i], dtype, op, _size(group), prescale, postscale) for i in places]
        # One dtype after another: if ranks differ in the number of dtypes, the first exchange raises on all ranks.
        with tf.control_dependencies(before):
            whole = _joined([x.sent for x in sent])
        coded = tf.expand_dims(whole, -1) if op == ReduceOp.Average else whole
        shown = [tensors[i] for i in places]
        each = f"{name}.{number}" if number else name
        reduced = _in_pieces(coded, lambda x, piece: _allreduce([x], op, piece, group, shown)[0], each)  # noqa: B023
        before = [reduced]
        for i, x, y in zip(places, sent, _parted(reduced, [x.sent for x in sent]), strict=True):
            results[i] = x.result(y)
    return results


def _joined(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Return several tensors as one vector, with leading axes of size 1 to encode their number; a single one as is."""
    if len(tensors) == 1:
        return tf.identity(tensors[0])
    whole = tf.concat([tf.reshape(x, [-1]) for x in tensors], axis=0)
    return tf.reshape(whole, tf.concat([[1] * (len(tensors) % _MOST_ONES), [tf.size(whole)]], axis=0))


def _parted(whole: tf.Tensor, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Undo :func:`_joined`: split ``whole`` into parts with the shapes of ``tensors``."""
    parts = [whole]
    if len(tensors) > 1:
        parts = tf.split(tf.reshape(whole, [-1]), [tf.size(x) for x in tensors], num=len(tensors))
    return [tf.ensure_shape(tf.reshape(part, tf.shape(x)), x.shape) for part, x in zip(parts, tensors, strict=True)]


def _in_pieces(x: tf.Tensor, collective: Callable[[tf.Tensor, str], tf.Tensor], name: str) -> tf.Tensor:
    """Run an elementwise collective, in pieces if there are too many elements for one MPI message."""
    elements = x.shape.num_elements()
    if elements is None or elements <= LARGEST:
        return collective(x, name)
    flat = tf.reshape(x, [-1])
    pieces = [flat[start : start + LARGEST] for start in range(0, elements, LARGEST)]
    results = [collective(piece, f"{name}.piece_{number}") for number, piece in enumerate(pieces)]
    return tf.reshape(tf.concat(results, axis=0), x.shape)


def _by_wire_dtype(tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tuple[tf.DType, list[int]]]:
    places: dict[tf.DType, list[int]] = {}
    for i, x in enumerate(tensors):
        places.setdefault(dtypes.wire_dtype(x.dtype, op), []).append(i)
    return list(places.items())


class _Reduced:
    """A tensor in a reduction.

    Attributes:
        sent: the tensor, encoded in its wire dtype.
    """

    def __init__(
        self, x: tf.Tensor, dtype: tf.DType, op: ReduceOp, size: int, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        self._dtype, self._size, self._postscale = x.dtype, size, postscale
        self._decode: dtypes.Decode = tf.identity
        self._is_divided = op == ReduceOp.Average and dtypes.average_factor(dtype, size) == 1.0
        self.sent = dtypes.scaled(tf.cast(x, dtype), prescale)
        if op in (ReduceOp.Min, ReduceOp.Max) and dtype.is_floating:
            order, self._decode = dtypes.ordered(self.sent)
            self.sent = dtypes.with_nan_as(self.sent, order, op)

    def result(self, reduced: tf.Tensor) -> tf.Tensor:
        """Decode the reduction of :attr:`sent`; return the reduction of the tensor."""
        y = self._decode(reduced)
        if self._is_divided:
            y = dtypes.divided(y, self._size)
        return tf.cast(dtypes.scaled(y, self._postscale), self._dtype)


def _within(group: cluster.Group | None) -> dict[str, Any]:
    """Return Horovod's argument that restricts a collective to ``group``."""
    return {} if group is None or group.process_set is None else {"process_set": group.process_set}


def _ranks(group: cluster.Group | None) -> Sequence[int] | None:
    return None if group is None else group.ranks


def _label(kind: str, name: str) -> str:
    return name.replace(PUBLIC, f"hvdkit.{kind}")


def _size(group: cluster.Group | None) -> int:
    return cluster.size() if group is None else group.size


def _allreduce(
    tensors: list[tf.Tensor],
    op: ReduceOp,
    name: str,
    group: cluster.Group | None,
    shown: Sequence[tf.Tensor] | None = None,
) -> list[tf.Tensor]:
    """Reduce tensors of one wire dtype in one exchange."""
    if _size(group) == 1:
        return [tf.identity(x) for x in tensors]
    from horovod.tensorflow.mpi_ops import _allreduce, _grouped_allreduce

    scale = dtypes.average_factor(tensors[0].dtype, _size(group)) if op == ReduceOp.Average else 1.0
    native = int(ReduceOp.Sum if op == ReduceOp.Average else op)
    options = {"op": native, "prescale_factor": scale, "ignore_name_scope": True, **_within(group)}

    def reduce(ready: list[tf.Tensor], matched: str) -> list[tf.Tensor]:
        if len(ready) == 1:
            return [_allreduce(ready[0], name=matched, **options)]
        return list(_grouped_allreduce(ready, name=matched, **options))

    return list(
        run_collective(name, tensors, reduce, label=_label("allreduce", name), shown=shown, ranks=_ranks(group))
    )


def allgather(x: tf.Tensor, name: str, group: cluster.Group | None = None) -> tf.Tensor:
    """Concatenate ``x`` of all ranks (or ``group``) along the first axis."""
    if _size(group) == 1:
        return tf.identity(x)
    from horovod.tensorflow import mpi_ops

    moved, back = dtypes.as_movable(x)

    def gather(ready: list[tf.Tensor], matched: str) -> tf.Tensor:
        return mpi_ops.allgather(ready[0], name=matched, ignore_name_scope=True, **_within(group))

    return back(
        run_collective(
            name, [moved], gather, label=_label("allgather", name), shown=[x], uneven=True, ranks=_ranks(group)
        )
    )


def compared_allgather(tensors: Sequence[tf.Tensor], name: str, group: cluster.Group | None = None) -> list[tf.Tensor]:
    """Run :func:`allgather` for several tensors; if ranks differ in their number, raise on all of them."""
    return _one_by_one(tensors, lambda x, each: allgather(x, each, group), name)


def _one_by_one(
    tensors: Sequence[tf.Tensor], collective: Callable[[tf.Tensor, str], tf.Tensor], name: str
) -> list[tf.Tensor]:
    """Run a collective for each tensor, the first before the others. Trailing axes of size 1 encode their number."""
    results: list[tf.Tensor] = []
    for number, x in enumerate(tensors):
        if len(tensors) == 1:
            return [collective(x, name)]
        ones = len(tensors) % _MOST_ONES
        with tf.control_dependencies(results[:1]):
            coded = tf.reshape(x, tf.concat([tf.shape(x), [1] * ones], axis=0))
        y = collective(coded, f"{name}.{number}" if number else name)
        shape = tf.shape(y)
        results.append(tf.reshape(y, shape[: tf.size(shape) - ones]))
        results[-1].set_shape([None, *x.shape[1:]] if x.shape.rank is not None else None)
    return results


def broadcast(x: tf.Tensor, root: int, name: str, group: cluster.Group | None = None) -> tf.Tensor:
    """Return rank ``root``'s ``x`` on all ranks (or those of ``group``)."""
    if _size(group) == 1:
        return tf.identity(x)
    from horovod.tensorflow import mpi_ops

    moved, back = dtypes.as_movable(x)

    def receive(ready: list[tf.Tensor], matched: str) -> tf.Tensor:
        return mpi_ops.broadcast(ready[0], root, name=matched, ignore_name_scope=True, **_within(group))

    def piece(part: tf.Tensor, each: str) -> tf.Tensor:
        shown, ranks = [part if part is not moved else x], _ranks(group)
        return run_collective(each, [part], receive, label=_label("broadcast", name), shown=shown, ranks=ranks)

    return back(_in_pieces(moved, piece, name))


def alltoall(
    x: tf.Tensor, splits: tf.Tensor, name: str, group: cluster.Group | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Send ``splits[r]`` rows of ``x`` to each rank r; return the received rows and the number from each rank."""
    if _size(group) == 1:
        return tf.identity(x), tf.cast(splits, tf.int32)
    from horovod.tensorflow import mpi_ops

    moved, back = dtypes.as_movable(x)

    def exchange(ready: list[tf.Tensor], matched: str) -> tuple[tf.Tensor, tf.Tensor]:
        return mpi_ops.alltoall(ready[0], splits=splits, name=matched, ignore_name_scope=True, **_within(group))

    received, received_splits = run_collective(
        name, [moved], exchange, label=_label("alltoall", name), shown=[x], uneven=True, ranks=_ranks(group)
    )
    return back(received), received_splits


def compared_alltoall(
    x: tf.Tensor, splits: tf.Tensor, fits: tf.Tensor, name: str, group: cluster.Group | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Run :func:`alltoall`; if ``fits`` is False on any rank, raise on all ranks.

    Such a rank sends zero rows with a width that no other rank has, which Horovod rejects on all ranks.
    """
    inner = tf.shape(x)[1:]
    rows = tf.reshape(x, [tf.shape(x)[0], tf.reduce_prod(inner)])
    sent = tf.cond(fits, lambda: rows, lambda: tf.zeros([0, BAD_SPLITS], x.dtype))
    counts = tf.cond(fits, lambda: splits, lambda: tf.zeros([_size(group)], splits.dtype))
    received, received_splits = alltoall(sent, counts, name, group)
    # Fails only if the splits of all ranks are wrong; otherwise Horovod has raised.
    with tf.control_dependencies([received]):
        check = tf.debugging.Assert(fits, [f"splits: expected {SPLITS}; got", splits, tf.shape(x)[0]])
    with tf.control_dependencies([check]):
        received = tf.reshape(received, tf.concat([[-1], inner], axis=0))
    received.set_shape([None, *x.shape[1:]])
    return received, received_splits


def reducescatter(x: tf.Tensor, op: ReduceOp, name: str, group: cluster.Group | None = None) -> tf.Tensor:
    """Reduce ``x`` over all ranks (or ``group``) and return this rank's rows of the result."""
    dtype, size = dtypes.wire_dtype(x.dtype, op), _size(group)
    if size == 1:
        return tf.identity(x)
    from horovod.tensorflow.mpi_ops import _reducescatter

    travelling = _Reduced(x, dtype, op, size)
    # Scale here: Horovod rejects scaling of tensors larger than its fusion buffer.
    sent = dtypes.scaled(travelling.sent, dtypes.average_factor(dtype, size) if op == ReduceOp.Average else 1.0)

    def reduce(ready: list[tf.Tensor], matched: str) -> tf.Tensor:
        return _reducescatter(ready[0], name=matched, op=int(ReduceOp.Sum), ignore_name_scope=True, **_within(group))

    return travelling.result(
        run_collective(name, [sent], reduce, label=_label("reducescatter", name), shown=[x], ranks=_ranks(group))
    )


def compared_reducescatter(
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    name: str,
    group: cluster.Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[tf.Tensor]:
    """Run :func:`reducescatter` for several tensors; if ranks differ in number, shapes or op, raise on all of them.

    Implemented as an alltoall, after which each rank sums its rows, because Horovod ends the job if its reducescatter
    has the same name as a collective of another kind.
    """

    def scatter(x: tf.Tensor, each: str) -> tf.Tensor:
        size = _size(group)
        dtype = dtypes.wire_dtype(x.dtype, op)
        travelling = _Reduced(x, dtype, op, size, prescale, postscale)
        if size == 1:
            return travelling.result(travelling.sent)
        sent = dtypes.scaled(travelling.sent, dtypes.average_factor(dtype, size) if op == ReduceOp.Average else 1.0)
        blocks, longer = _blocks(sent, size)
        # Encode what the shape does not show: how many ranks get one more row, and whether it is an average.
        ones = (longer % _MOST_ONES) + (_MOST_ONES if op == ReduceOp.Average else 0)
        coded = tf.reshape(blocks, tf.concat([tf.shape(blocks), tf.ones([ones], tf.int32)], axis=0))
        received, _ = alltoall(coded, tf.ones([size], tf.int32), each, group)
        total = tf.reduce_sum(tf.reshape(received, tf.shape(blocks)), axis=0)
        index = cluster.rank() if group is None else group.index
        rows = tf.shape(x)[0] // size + tf.cast(index < longer, tf.int32)
        result = travelling.result(total[:rows])
        return tf.ensure_shape(result, [None, *x.shape[1:]])

    return _one_by_one(tensors, scatter, name)


def _blocks(x: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return ``x`` as ``[size, rows of a rank, ...]``, padded with zeros, and how many ranks get one more row."""
    rows, inner = tf.shape(x)[0], tf.shape(x)[1:]
    longer = rows % size
    each = rows // size
    more = tf.cast(longer > 0, tf.int32)
    head = tf.reshape(x[: longer * (each + 1)], tf.concat([[longer, each + more], inner], axis=0))
    tail = tf.reshape(x[longer * (each + 1) :], tf.concat([[size - longer, each], inner], axis=0))
    padded = tf.concat([tail, tf.zeros(tf.concat([[size - longer, more], inner], axis=0), x.dtype)], axis=1)
    return tf.concat([head, padded], axis=0), longer
