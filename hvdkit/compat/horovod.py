"""Horovod-compatible API: users of Horovod's TensorFlow and Keras modules only need to change an import.

    import hvdkit.compat.horovod as hvd  # instead of horovod.tensorflow.keras, horovod.keras or horovod.tensorflow

Horovod features that hvdkit does not support raise an error. Options that only affect how gradients are sent are
accepted and ignored: ``device_dense``, ``device_sparse``, ``sparse_as_dense``, ``gradient_predivide_factor``,
``num_groups``, ``groups``, ``name``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import hvdkit as hk
from hvdkit import cluster, collectives
from hvdkit.cluster import init, local_rank, local_size, rank, shutdown, size
from hvdkit.collectives import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    allgather_object,
    broadcast_object,
    join,
    local_rank_op,
    local_size_op,
    rank_op,
    size_op,
)
from hvdkit.compat import horovod_callbacks as callbacks
from hvdkit.errors import describe, see

global_process_set = None
"""All ranks."""

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "rank",
    "rank_op",
    "reducescatter",
    "shutdown",
    "size",
    "size_op",
]


class Compression:
    """Compression of gradients: ``none``, ``fp16`` or ``bf16``."""

    none = None
    fp16 = "fp16"
    bf16 = "bf16"


def is_initialized() -> bool:
    """Return True after :func:`init`."""
    try:
        cluster.size()
    except hk.ClusterError:
        return False
    return True


def cross_rank() -> int:
    """Return the index of this rank's host among the hosts that have a rank with this ``local_rank``."""
    hosts = cluster.cluster().hosts
    return list(dict.fromkeys(hosts)).index(hosts[rank()])


def cross_size() -> int:
    """Return the number of hosts."""
    return len(set(cluster.cluster().hosts))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: str | None = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """Reduce a tensor or IndexedSlices over ranks, by default to the average.

    Args:
        tensor: as for :func:`hvdkit.allreduce`, or IndexedSlices.
        average: True for the average, False for the sum; alternatively pass ``op``.
        compression: ``Compression.fp16`` or ``Compression.bf16``, for averages and sums.
        op, prescale_factor, postscale_factor, name, process_set: as for :func:`hvdkit.allreduce`.
        device_dense, device_sparse: ignored.

    Raises:
        ValueError: both ``average`` and ``op`` are passed; or factors with IndexedSlices or compression.
    """
    op = _op(average, op)
    if compression is None and not isinstance(tensor, tf.IndexedSlices):
        factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return collectives.allreduce(tensor, op, name=name, process_set=process_set, **factors)
    if (prescale_factor, postscale_factor) != (1.0, 1.0):
        got, expected = (prescale_factor, postscale_factor), "1.0 with IndexedSlices or compression"
        raise ValueError(describe("prescale_factor, postscale_factor", got, expected, "multiply the tensor"))
    return hk.average_gradients([tensor], op=op, compression=compression, process_set=process_set)[0]


def grouped_allreduce(
    tensors: Any, average: bool | None = None, op: Any = None, name: str | None = None, process_set: Any = None
) -> list[Any]:
    """Reduce several tensors. Args as for :func:`allreduce`."""
    return collectives.grouped_allreduce(tensors, _op(average, op), name=name, process_set=process_set)


def allgather(tensor: Any, name: str | None = None, process_set: Any = None) -> Any:
    """Return all ranks' rows. Args as for :func:`hvdkit.allgather`."""
    return collectives.allgather(tensor, name=name, process_set=process_set)


def alltoall(tensor: Any, splits: Any = None, name: str | None = None, process_set: Any = None) -> Any:
    """Send rows to each rank. Args as for :func:`hvdkit.alltoall`."""
    return collectives.alltoall(tensor, splits, name=name, process_set=process_set)


def reducescatter(tensor: Any, op: Any = Average, name: str | None = None, process_set: Any = None) -> Any:
    """Reduce a tensor and return this rank's rows. Args as for :func:`hvdkit.reducescatter`."""
    return collectives.reducescatter(tensor, op, name=name, process_set=process_set)


def broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """Return the tensor of ``root_rank``. Args as for :func:`hvdkit.broadcast`."""
    return collectives.broadcast(tensor, root_rank, name=name, process_set=process_set)


def broadcast_variables(variables: Any, root_rank: int = 0) -> None:
    """Assign the values of ``root_rank`` to all variables. Also works inside a ``tf.function``."""
    if not tf.inside_function():
        hk.broadcast_variables(variables, root_rank)
        return
    for variable in variables:
        variable.assign(collectives.broadcast(tf.convert_to_tensor(variable), root_rank))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: str | None = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
) -> Any:
    """Wrap ``optimizer`` in a :func:`hvdkit.DistributedOptimizer`.

    Args:
        optimizer, compression, op, process_set: as for :func:`hvdkit.DistributedOptimizer`.
        backward_passes_per_step: ``accumulate_steps`` of :func:`hvdkit.DistributedOptimizer`.
        average_aggregated_gradients: must be True if ``backward_passes_per_step`` is not 1.
        name, device_dense, device_sparse, sparse_as_dense, gradient_predivide_factor, num_groups, groups: ignored.

    Raises:
        ValueError: gradients would be summed over steps; or as for :func:`hvdkit.DistributedOptimizer`.
    """
    if backward_passes_per_step != 1 and not average_aggregated_gradients:
        expected = f"True with backward_passes_per_step={backward_passes_per_step}: hvdkit has no sum over steps"
        remedy = "pass True and multiply the learning rate"
        raise ValueError(describe("average_aggregated_gradients", average_aggregated_gradients, expected, remedy))
    return hk.DistributedOptimizer(
        optimizer, op=op, compression=compression, accumulate_steps=backward_passes_per_step, process_set=process_set
    )


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: str | None = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
) -> Any:
    """Wrap ``gradtape`` in a :class:`hvdkit.DistributedGradientTape`. Args as for it; other arguments are ignored."""
    return hk.DistributedGradientTape(gradtape, op=op, compression=compression, process_set=process_set)


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, compression: Any = None
) -> Any:
    """Load a model with :func:`hvdkit.load_model`.

    Args:
        filepath, custom_objects, compression: as for :func:`hvdkit.load_model`.
        custom_optimizers: optimizer classes that the file may contain.
    """
    optimizers = {cls.__name__: cls for cls in custom_optimizers or ()}
    options = {} if compression is None else {"compression": compression}
    return hk.load_model(filepath, {**optimizers, **(custom_objects or {})}, **options)


def _op(average: bool | None, op: Any) -> Any:
    if average is not None and op is not None:
        raise ValueError(describe("average", average, "None if op is given", "pass op only"))
    if op is not None:
        return op
    return Sum if average is False else Average


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    got = f"{name!r}, which hvdkit does not provide under Horovod's name"
    raise AttributeError(describe("hvdkit.compat.horovod", got, f"one of {', '.join(__all__)}", see("gradients")))
