"""Horovod-compatible API: users of Horovod's TensorFlow and Keras modules only need to change an import.

    import hvdkit.compat.horovod as hvd  # instead of horovod.tensorflow.keras, horovod.keras or horovod.tensorflow

Horovod features that hvdkit does not support raise an error. Options that only affect how gradients are sent are
accepted and ignored: ``device_dense``, ``device_sparse``, ``sparse_as_dense``, ``gradient_predivide_factor``,
``num_groups``, ``groups``, ``name``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

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
from hvdkit.compat.horovod_training import Compression, DistributedGradientTape, DistributedOptimizer, load_model
from hvdkit.errors import describe, see
from hvdkit.keras import horovod_callbacks as callbacks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from hvdkit.collectives.conversion import SameKind, TensorLike
    from hvdkit.collectives.ops import ReduceOp
    from hvdkit.collectives.process_sets import RankGroup
    from hvdkit.sharding.shards import AnyVariable

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


def is_initialized() -> bool:
    """Return True between ``init`` and ``shutdown``.

    Examples:
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> hvd.is_initialized()
        True
    """
    return cluster.is_initialized()


def cross_rank() -> int:
    """Return the index of this rank's host among the job's hosts.

    Examples:
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> 0 <= hvd.cross_rank() < hvd.cross_size()
        True
    """
    hosts = cluster.cluster().hosts
    return list(dict.fromkeys(hosts)).index(hosts[rank()])


def cross_size() -> int:
    """Return the number of hosts.

    Examples:
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> hvd.cross_size() == len(set(cluster.hosts))
        True
    """
    return len(set(cluster.cluster().hosts))


def allreduce(
    tensor: TensorLike,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: str | None = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: RankGroup = None,
) -> SameKind:
    """Reduce a tensor or IndexedSlices over ranks, by default to the average.

    Args:
        tensor: as for ``hk.allreduce``, or IndexedSlices.
        average: True for the average, False for the sum; alternatively pass ``op``.
        device_dense: ignored.
        device_sparse: ignored.
        compression: ``Compression.fp16`` or ``Compression.bf16``, for averages and sums.
        op: as for ``hk.allreduce``.
        prescale_factor: as for ``hk.allreduce``.
        postscale_factor: as for ``hk.allreduce``.
        name: as for ``hk.allreduce``.
        process_set: as for ``hk.allreduce``.

    Returns:
        As for ``hk.allreduce``; of IndexedSlices, the distinct rows of all ranks.

    Raises:
        ValueError: both ``average`` and ``op`` are passed; or factors with compression.

    Examples:
        >>> import numpy as np
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> hvd.allreduce(np.float32([1, 2]))
        array([1., 2.], dtype=float32)
        >>> hvd.allreduce(1, op=hvd.Sum) == hvd.size()
        True
    """
    op = _op(average, op)
    if compression is None:
        return collectives.allreduce(
            tensor,
            op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            name=name,
        )
    if (prescale_factor, postscale_factor) != (1.0, 1.0):
        got = (prescale_factor, postscale_factor)
        expected = "1.0 with compression"
        raise ValueError(describe("prescale_factor, postscale_factor", got, expected, "multiply the tensor"))
    return hk.average_gradients([tensor], op=op, compression=compression, process_set=process_set)[0]


def grouped_allreduce(
    tensors: Sequence[TensorLike],
    average: bool | None = None,
    op: ReduceOp | None = None,
    name: str | None = None,
    process_set: RankGroup = None,
) -> list[SameKind]:
    """Reduce several tensors, by default to their averages.

    Args:
        tensors: as for ``hk.grouped_allreduce``.
        average: as for ``allreduce``.
        op: as for ``allreduce``.
        name: as for ``hk.allreduce``.
        process_set: as for ``hk.allreduce``.

    Returns:
        The results, in the order of ``tensors``.

    Raises:
        ValueError: both ``average`` and ``op`` are passed.

    Examples:
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> hvd.grouped_allreduce([0.25, 0.5])
        [0.25, 0.5]
    """
    return collectives.grouped_allreduce(tensors, _op(average, op), name=name, process_set=process_set)


def allgather(tensor: TensorLike, name: str | None = None, process_set: RankGroup = None) -> SameKind:
    """Concatenate the rows of all ranks (``hk.allgather``).

    Args:
        tensor: ``x`` of ``hk.allgather``.
        name: as for ``hk.allgather``.
        process_set: as for ``hk.allgather``.

    Returns:
        All ranks' rows, in rank order.

    Examples:
        >>> import numpy as np
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> hvd.allgather(np.zeros((2, 8))).shape == (2 * hvd.size(), 8)
        True
    """
    return collectives.allgather(tensor, name=name, process_set=process_set)


def alltoall(
    tensor: TensorLike,
    splits: npt.ArrayLike | tf.Tensor | None = None,
    name: str | None = None,
    process_set: RankGroup = None,
) -> SameKind:
    """Send rows to each rank (``hk.alltoall``).

    Args:
        tensor: ``x`` of ``hk.alltoall``.
        splits: as for ``hk.alltoall``.
        name: as for ``hk.alltoall``.
        process_set: as for ``hk.alltoall``.

    Returns:
        The received rows, and with ``splits`` their number from each rank.

    Examples:
        >>> import numpy as np
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> hvd.alltoall(np.arange(hvd.size())).tolist() == [hvd.rank()] * hvd.size()
        True
    """
    return collectives.alltoall(tensor, splits, name=name, process_set=process_set)


def reducescatter(
    tensor: TensorLike, op: ReduceOp = Average, name: str | None = None, process_set: RankGroup = None
) -> SameKind:
    """Reduce a tensor, and scatter its rows over the ranks (``hk.reducescatter``).

    Args:
        tensor: ``x`` of ``hk.reducescatter``.
        op: as for ``hk.reducescatter``.
        name: as for ``hk.reducescatter``.
        process_set: as for ``hk.reducescatter``.

    Returns:
        This rank's rows of the result.

    Examples:
        >>> import numpy as np
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> hvd.reducescatter(np.ones(3 * hvd.size()))
        array([1., 1., 1.])
    """
    return collectives.reducescatter(tensor, op, name=name, process_set=process_set)


def broadcast(tensor: TensorLike, root_rank: int, name: str | None = None, process_set: RankGroup = None) -> SameKind:
    """Return the tensor of one rank on every rank (``hk.broadcast``).

    Args:
        tensor: ``x`` of ``hk.broadcast``.
        root_rank: ``root`` of ``hk.broadcast``.
        name: as for ``hk.broadcast``.
        process_set: as for ``hk.broadcast``.

    Returns:
        The tensor of ``root_rank``, on every rank.

    Examples:
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> hvd.broadcast(hvd.rank(), root_rank=0)
        0
    """
    return collectives.broadcast(tensor, root_rank, name=name, process_set=process_set)


def broadcast_variables(variables: Iterable[AnyVariable], root_rank: int = 0) -> None:
    """Assign the values of ``root_rank`` to all variables. Also works inside a ``tf.function``.

    Args:
        variables: as for ``hk.broadcast_variables``.
        root_rank: the rank whose values are sent.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit.compat.horovod as hvd
        >>> cluster = hvd.init()
        >>> variable = tf.Variable(hvd.rank())
        >>> hvd.broadcast_variables([variable], root_rank=0)
        >>> int(variable)
        0
    """
    if not tf.inside_function():
        hk.broadcast_variables(variables, root_rank)
        return
    for variable in variables:
        variable.assign(collectives.broadcast(tf.convert_to_tensor(variable), root_rank))


def _op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is not None and op is not None:
        raise ValueError(describe("average", average, "None if op is given", "pass op only"))
    if op is not None:
        return op
    return Sum if average is False else Average


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    got = f"{name!r}, which hvdkit does not provide under Horovod's name"
    raise AttributeError(describe("hvdkit.compat.horovod", got, f"one of {', '.join(__all__)}", see("gradients")))
