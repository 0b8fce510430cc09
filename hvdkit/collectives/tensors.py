"""TensorFlow tensors through Horovod: one function per collective, for eager mode and graphs.

:mod:`hvdkit.collectives.dtypes` defines the wire dtypes.

Horovod matches collectives by name, and compares kind, dtype, shape, root and reduction of matching ones. So names in
graphs depend only on the function and the order in it, and properties that Horovod does not compare are encoded in the
shape. A difference then raises on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import dtypes, graph_recorder, graphs
from hvdkit.collectives.ops import ReduceOp
from hvdkit.collectives.refusal import require_allowed

Result = TypeVar("Result")
# Collectives called by users share one name, so that Horovod also compares their kinds.
PUBLIC = "hvdkit.collective"
# A number is encoded as that many axes of size 1, modulo this: TensorFlow's tensors have at most 254 axes.
_MOST_ONES = 64
# MPI counts the elements of a message with a C int.
LARGEST = 2**31 - 1
# An axis length that no tensor has. A rank whose splits do not match its rows sends it, so that the others raise, too.
_BAD_SPLITS = 2_000_000_011
SPLITS = "one non-negative row count for each rank, adding up to the rows of x"


def grouped_allreduce(
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    name: str,
    group: cluster.Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    compares: bool = False,
) -> list[tf.Tensor]:
    """Reduce every tensor over all ranks (or ``group``), with one exchange per wire dtype.

    With ``compares``, raise on all ranks if they differ in the number of tensors.
    """
    indices_of: dict[tf.DType, list[int]] = {}
    for i, x in enumerate(tensors):
        indices_of.setdefault(dtypes.wire_dtype(x.dtype, op), []).append(i)
    results: list[tf.Tensor | None] = [None] * len(tensors)
    reduced: list[tf.Tensor] = []
    for number, indices in enumerate(indices_of.values()):
        originals = [tensors[i] for i in indices]
        wire = [dtypes.encoded(x, op, _size(group), prescale, postscale) for x in originals]
        values = [value for value, _ in wire]
        each = f"{name}.{number}" if number else name
        if compares:
            reduced = _allreduce_packed(values, op, each, group, shown=originals, after=reduced[:1])
        else:
            reduced = _allreduce_one_dtype(values, op, each, group)
        for i, (_, decode), y in zip(indices, wire, reduced, strict=True):
            results[i] = decode(y)
    return results


def _allreduce_packed(
    values: list[tf.Tensor],
    op: ReduceOp,
    name: str,
    group: cluster.Group | None,
    *,
    shown: Sequence[tf.Tensor],
    after: list[tf.Tensor],
) -> list[tf.Tensor]:
    """Reduce tensors of one wire dtype as one vector, after the exchange of another dtype.

    The number of leading axes of size 1 encodes the number of tensors, and a trailing one encodes Average. If ranks
    differ in the number of dtypes, the first exchange raises on all ranks.
    """
    with tf.control_dependencies(after):
        packed = _pack(values)
    if op == ReduceOp.Average:
        packed = tf.expand_dims(packed, -1)
    reduced = _in_pieces(packed, lambda x, piece: _allreduce_one_dtype([x], op, piece, group, shown)[0], name)
    return _unpack(reduced, values)


def _pack(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Return several tensors as one vector, with leading axes of size 1 to encode their number; a single one as is."""
    if len(tensors) == 1:
        return tf.identity(tensors[0])
    flat = tf.concat([tf.reshape(x, [-1]) for x in tensors], axis=0)
    return tf.reshape(flat, tf.concat([[1] * (len(tensors) % _MOST_ONES), [tf.size(flat)]], axis=0))


def _unpack(packed: tf.Tensor, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Undo :func:`_pack`: split ``packed`` into parts with the shapes of ``tensors``."""
    parts = [packed]
    if len(tensors) > 1:
        parts = tf.split(tf.reshape(packed, [-1]), [tf.size(x) for x in tensors], num=len(tensors))
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


def _size(group: cluster.Group | None) -> int:
    return cluster.size() if group is None else group.size


def _run(
    kind: str,
    native: Callable[..., Result],
    tensors: list[tf.Tensor],
    name: str,
    group: cluster.Group | None,
    *,
    shown: Sequence[tf.Tensor],
    uneven: bool = False,
) -> Result:
    """Run Horovod's op ``native`` on ``tensors``, eagerly or as part of the current graph, and return its result."""
    require_allowed(kind)
    options: dict[str, object] = {"ignore_name_scope": True}
    if group is not None and group.process_set is not None:
        options["process_set"] = group.process_set
    if not tf.inside_function():
        return native(*tensors, name=name, **options)
    ranks = None if group is None else group.ranks
    op_name = graphs.op_name(name, ranks)
    result = graph_recorder.run(
        lambda ready: native(*ready, name=op_name, **options),
        [graphs.not_constant(x) for x in tensors],
        op_name=op_name,
        label=name.replace(PUBLIC, f"hvdkit.{kind}"),
        shown=shown,
        uneven=uneven,
        ranks=ranks,
    )
    graphs.run_in_step(tf.nest.flatten(result)[0])
    return result


def _allreduce_one_dtype(
    tensors: list[tf.Tensor],
    op: ReduceOp,
    name: str,
    group: cluster.Group | None,
    shown: Sequence[tf.Tensor] | None = None,
) -> list[tf.Tensor]:
    """Reduce tensors of one wire dtype in one exchange. Messages describe ``shown``; default: ``tensors``."""
    if _size(group) == 1:
        return [tf.identity(x) for x in tensors]
    from horovod.tensorflow.mpi_ops import _allreduce, _grouped_allreduce

    scale = dtypes.average_factor(tensors[0].dtype, op, _size(group))
    native = {"op": int(ReduceOp.Sum if op == ReduceOp.Average else op), "prescale_factor": scale}

    def reduce(*ready: tf.Tensor, **options: object) -> list[tf.Tensor]:
        if len(ready) == 1:
            return [_allreduce(*ready, **native, **options)]
        return list(_grouped_allreduce(list(ready), **native, **options))

    return list(_run("allreduce", reduce, tensors, name, group, shown=tensors if shown is None else shown))


def allgather(x: tf.Tensor, name: str, group: cluster.Group | None = None) -> tf.Tensor:
    """Concatenate ``x`` of all ranks (or ``group``) along the first axis."""
    if _size(group) == 1:
        return tf.identity(x)
    from horovod.tensorflow import mpi_ops

    moved, back = dtypes.as_movable(x)
    return back(_run("allgather", mpi_ops.allgather, [moved], name, group, shown=[x], uneven=True))


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

    native = partial(mpi_ops.broadcast, root_rank=root)

    def broadcast_piece(piece: tf.Tensor, each: str) -> tf.Tensor:
        return _run("broadcast", native, [piece], each, group, shown=[x if piece is moved else piece])

    return back(_in_pieces(moved, broadcast_piece, name))


def alltoall(
    x: tf.Tensor, splits: tf.Tensor, name: str, group: cluster.Group | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Send ``splits[r]`` rows of ``x`` to each rank r; return the received rows and the number from each rank."""
    if _size(group) == 1:
        return tf.identity(x), tf.cast(splits, tf.int32)
    from horovod.tensorflow import mpi_ops

    moved, back = dtypes.as_movable(x)
    native = partial(mpi_ops.alltoall, splits=splits)
    received, received_splits = _run("alltoall", native, [moved], name, group, shown=[x], uneven=True)
    return back(received), received_splits


def compared_alltoall(
    x: tf.Tensor, splits: tf.Tensor, are_valid: tf.Tensor, name: str, group: cluster.Group | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Run :func:`alltoall`; if ``are_valid`` is False on any rank, raise on all ranks.

    Such a rank sends zero rows with a width that no other rank has, which Horovod rejects on all ranks.
    """
    inner = tf.shape(x)[1:]
    rows = tf.reshape(x, [tf.shape(x)[0], tf.reduce_prod(inner)])
    sent = tf.cond(are_valid, lambda: rows, lambda: tf.zeros([0, _BAD_SPLITS], x.dtype))
    counts = tf.cond(are_valid, lambda: splits, lambda: tf.zeros([_size(group)], splits.dtype))
    received, received_splits = alltoall(sent, counts, name, group)
    # Fails only if the splits of all ranks are wrong; otherwise Horovod has raised.
    with tf.control_dependencies([received]):
        check = tf.debugging.Assert(are_valid, [f"splits: expected {SPLITS}; got", splits, tf.shape(x)[0]])
    with tf.control_dependencies([check]):
        received = tf.reshape(received, tf.concat([[-1], inner], axis=0))
    received.set_shape([None, *x.shape[1:]])
    return received, received_splits


def reducescatter(x: tf.Tensor, op: ReduceOp, name: str, group: cluster.Group | None = None) -> tf.Tensor:
    """Reduce ``x`` over all ranks (or ``group``) and return this rank's rows of the result."""
    size = _size(group)
    if size == 1:
        return tf.identity(x)
    from horovod.tensorflow.mpi_ops import _reducescatter

    values, decode = dtypes.encoded(x, op, size)
    native = partial(_reducescatter, op=int(ReduceOp.Sum))
    # Scale here: Horovod rejects scaling of tensors larger than its fusion buffer.
    summand = dtypes.scaled(values, dtypes.average_factor(values.dtype, op, size))
    return decode(_run("reducescatter", native, [summand], name, group, shown=[x]))


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
        values, decode = dtypes.encoded(x, op, size, prescale, postscale)
        if size == 1:
            return decode(values)
        blocks, remainder = _blocks(dtypes.scaled(values, dtypes.average_factor(values.dtype, op, size)), size)
        # Encode what the shape does not show: how many ranks get one more row, and whether it is an average.
        ones = (remainder % _MOST_ONES) + (_MOST_ONES if op == ReduceOp.Average else 0)
        coded = tf.reshape(blocks, tf.concat([tf.shape(blocks), tf.ones([ones], tf.int32)], axis=0))
        received, _ = alltoall(coded, tf.ones([size], tf.int32), each, group)
        total = tf.reduce_sum(tf.reshape(received, tf.shape(blocks)), axis=0)
        index = cluster.rank() if group is None else group.index
        rows = tf.shape(x)[0] // size + tf.cast(index < remainder, tf.int32)
        return tf.ensure_shape(decode(total[:rows]), [None, *x.shape[1:]])

    return _one_by_one(tensors, scatter, name)


def _blocks(x: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return ``x`` as ``[size, rows of a rank, ...]``, padded with zeros, and how many ranks get one more row."""
    rows = tf.shape(x)[0]
    inner = tf.shape(x)[1:]
    quotient = rows // size
    remainder = rows % size
    padding = tf.cast(remainder > 0, tf.int32)
    head_rows = remainder * (quotient + 1)
    head = tf.reshape(x[:head_rows], tf.concat([[remainder, quotient + padding], inner], axis=0))
    tail = tf.reshape(x[head_rows:], tf.concat([[size - remainder, quotient], inner], axis=0))
    zeros = tf.zeros(tf.concat([[size - remainder, padding], inner], axis=0), x.dtype)
    return tf.concat([head, tf.concat([tail, zeros], axis=1)], axis=0), remainder
