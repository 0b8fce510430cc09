"""TensorFlow tensors through Horovod: one function a collective, the same in eager mode and in graphs.

Horovod takes a part of TensorFlow's dtypes. The others travel by a conversion that is stated here:

* moving (allgather, broadcast, alltoall): any other fixed-size dtype as its bytes, bit for bit;
* reducing: bfloat16 in float32, and rounded back; small integers and bool in int32 (bool: Min is *and*,
  Max is *or*). ``Average`` of integers is the sum divided by the number of ranks, rounded toward zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.graphs import run_collective
from hvdkit.collectives.ops import ReduceOp
from hvdkit.errors import describe

_MOVED = {
    tf.uint8,
    tf.int8,
    tf.uint16,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.float32,
    tf.float64,
    tf.bool,
}
_REDUCED = {tf.int32, tf.int64, tf.float16, tf.float32, tf.float64}
_REDUCED_IN = {
    tf.bfloat16: tf.float32,
    tf.uint8: tf.int32,
    tf.int8: tf.int32,
    tf.uint16: tf.int32,
    tf.int16: tf.int32,
    tf.uint32: tf.int64,
    tf.bool: tf.int32,
}


def wire_dtype(dtype: tf.DType, op: ReduceOp) -> tf.DType:
    """Return the dtype in which ``dtype`` is reduced by ``op``.

    Raises:
        TypeError: Horovod cannot reduce ``dtype``, and no conversion of it is exact enough.
    """
    wire = dtype if dtype in _REDUCED else _REDUCED_IN.get(dtype)
    if wire is None or (dtype == tf.bool and op in (ReduceOp.Average, ReduceOp.Sum)):
        raise TypeError(
            describe(
                "x",
                f"dtype {dtype.name} with op {op.name}",
                "a real number that Horovod can reduce (bool: Min and Max only)",
                "cast it first, e.g. tf.cast(x, tf.float32)",
            )
        )
    return wire


def grouped_allreduce(
    tensors: Sequence[tf.Tensor], op: ReduceOp, name: str, group: cluster.Group | None = None
) -> list[tf.Tensor]:
    """Reduce every tensor over all ranks (or ``group``), all tensors of one wire dtype in one exchange."""
    wires = [wire_dtype(x.dtype, op) for x in tensors]
    results: list[Any] = [None] * len(tensors)
    for wire in dict.fromkeys(wires):
        places = [i for i, w in enumerate(wires) if w == wire]
        reduced = _reduce_one_dtype([tf.cast(tensors[i], wire) for i in places], op, f"{name}_{wire.name}", group)
        for i, y in zip(places, reduced, strict=True):
            results[i] = tf.cast(y, tensors[i].dtype)
    return results


def _within(group: cluster.Group | None) -> dict[str, Any]:
    """Return what tells Horovod that a collective is among some ranks only."""
    return {} if group is None or group.process_set is None else {"process_set": group.process_set}


def _ranks(group: cluster.Group | None) -> Sequence[int] | None:
    return None if group is None else group.ranks


def _reduce_one_dtype(
    tensors: list[tf.Tensor], op: ReduceOp, name: str, group: cluster.Group | None
) -> list[tf.Tensor]:
    size = cluster.size() if group is None else group.size
    if size == 1:
        return [tf.identity(x) for x in tensors]
    from horovod.tensorflow.mpi_ops import _allreduce, _grouped_allreduce

    scale, finish = _averaging(tensors[0].dtype, op, size)
    native = int(ReduceOp.Sum if op == ReduceOp.Average else op)
    options = {"op": native, "prescale_factor": scale, "ignore_name_scope": True, **_within(group)}

    def reduce(ready: list[tf.Tensor], matched: str) -> list[tf.Tensor]:
        if len(ready) == 1:
            return [_allreduce(ready[0], name=matched, **options)]
        return _grouped_allreduce(ready, name=matched, **options)

    return [finish(y) for y in run_collective(name, tensors, reduce, ranks=_ranks(group))]


def _averaging(dtype: tf.DType, op: ReduceOp, size: int) -> tuple[float, Any]:
    """Return the factor before a sum, and the function after it, that make the sum an average where ``op`` asks."""
    if op != ReduceOp.Average:
        return 1.0, tf.identity
    if dtype.is_integer:
        return 1.0, lambda y: tf.truncatediv(y, tf.cast(size, y.dtype))
    # Horovod keeps its factor in float32, too coarse for float64.
    if dtype == tf.float64:
        return 1.0, lambda y: y / size
    # Scaling before the sum keeps fp16 from overflowing where the average itself would not.
    return 1.0 / size, tf.identity


def allgather(x: tf.Tensor, name: str, group: cluster.Group | None = None) -> tf.Tensor:
    """Concatenate ``x`` of all ranks (or ``group``) along the first axis."""
    if group is not None and group.size == 1:
        return tf.identity(x)
    from horovod.tensorflow import mpi_ops

    moved, back = _as_movable(x)

    def gather(ready: list[tf.Tensor], matched: str) -> tf.Tensor:
        return mpi_ops.allgather(ready[0], name=matched, ignore_name_scope=True, **_within(group))

    return back(run_collective(name, [moved], gather, shown=[x], uneven=True, ranks=_ranks(group)))


def broadcast(x: tf.Tensor, root: int, name: str) -> tf.Tensor:
    """Return rank ``root``'s ``x`` everywhere."""
    from horovod.tensorflow import mpi_ops

    moved, back = _as_movable(x)

    def receive(ready: list[tf.Tensor], matched: str) -> tf.Tensor:
        return mpi_ops.broadcast(ready[0], root, name=matched, ignore_name_scope=True)

    return back(run_collective(name, [moved], receive, shown=[x]))


def alltoall(x: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Send ``splits[r]`` rows of ``x`` to each rank r; return the rows received and how many came from each."""
    from horovod.tensorflow import mpi_ops

    moved, back = _as_movable(x)

    def exchange(ready: list[tf.Tensor], matched: str) -> tuple[tf.Tensor, tf.Tensor]:
        return mpi_ops.alltoall(ready[0], splits=splits, name=matched, ignore_name_scope=True)

    received, received_splits = run_collective(name, [moved], exchange, shown=[x], uneven=True)
    return back(received), received_splits


def reducescatter(x: tf.Tensor, op: ReduceOp, name: str) -> tf.Tensor:
    """Reduce ``x`` over all ranks and return this rank's rows of the result."""
    from horovod.tensorflow.mpi_ops import _reducescatter

    wire = wire_dtype(x.dtype, op)
    if cluster.size() == 1:
        return tf.identity(x)
    scale, finish = _averaging(wire, op, cluster.size())
    sent = tf.cast(x, wire)
    if scale != 1.0:  # not by Horovod, which would refuse what is larger than its fusion buffer
        sent *= tf.cast(scale, wire)

    def reduce(ready: list[tf.Tensor], matched: str) -> tf.Tensor:
        return _reducescatter(ready[0], name=matched, op=int(ReduceOp.Sum), ignore_name_scope=True)

    return tf.cast(finish(run_collective(name, [sent], reduce, shown=[x])), x.dtype)


def check_movable(dtype: tf.DType) -> None:
    """Raise TypeError where values of ``dtype`` cannot be moved bit for bit."""
    if dtype not in _MOVED and not (dtype.is_floating or dtype.is_integer):
        raise TypeError(
            describe(
                "x", f"dtype {dtype.name}", "a real number or bool", "send it with hk.allgather_object or as numbers"
            )
        )


def _as_movable(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """Return ``x`` in a dtype that Horovod moves, and the function that turns a result back."""
    check_movable(x.dtype)
    if x.dtype in _MOVED:
        return x, tf.identity
    if x.dtype.size == 1:
        return tf.bitcast(x, tf.uint8), lambda y: tf.bitcast(y, x.dtype)
    if x.dtype.size == 2:
        return tf.bitcast(x, tf.uint16), lambda y: tf.bitcast(y, x.dtype)
    whole = tf.int32 if x.dtype.size == 4 else tf.int64
    return tf.bitcast(x, whole), lambda y: tf.bitcast(y, x.dtype)
