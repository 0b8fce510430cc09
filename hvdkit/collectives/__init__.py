"""Collectives: tensors through Horovod, objects through mpi4py where there is an MPI world."""

from hvdkit.collectives.api import (
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_object,
    grouped_allreduce,
    reducescatter,
)
from hvdkit.collectives.ops import Average, Max, Min, ReduceOp, Sum
from hvdkit.collectives.variables import broadcast_variables, compare_variables

__all__ = [
    "Average",
    "Max",
    "Min",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "compare_variables",
    "grouped_allreduce",
    "reducescatter",
]
