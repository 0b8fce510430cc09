"""Collectives: tensors through Horovod, objects through mpi4py if MPI is available."""

from hvdkit.collectives.asynchronous import (
    Handle,
    allgather_async,
    allreduce_async,
    alltoall_async,
    broadcast_async,
    grouped_allreduce_async,
    reducescatter_async,
    wait,
)
from hvdkit.collectives.gathers import allgather, alltoall, grouped_allgather
from hvdkit.collectives.joining import join
from hvdkit.collectives.objects import allgather_object, barrier, broadcast_object
from hvdkit.collectives.ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from hvdkit.collectives.process_sets import ProcessSet, cross_set, local_set
from hvdkit.collectives.rank_ops import local_rank_op, local_size_op, rank_op, size_op
from hvdkit.collectives.reductions import (
    allreduce,
    broadcast,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "cross_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_set",
    "local_size_op",
    "rank_op",
    "reducescatter",
    "reducescatter_async",
    "size_op",
    "wait",
]
