"""hvdkit: train TensorFlow and Keras 3 models across GPUs and hosts with Horovod.

Names are loaded on first use: ``import hvdkit`` requires neither Horovod nor MPI, and without a launcher it does not
import TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdkit._version import __version__
from hvdkit.cluster.tensorflow_loading import prepare_import as _prepare_import
from hvdkit.errors import (
    CheckpointError,
    ClusterError,
    CollectiveMismatchError,
    CorruptCheckpointError,
    HvdkitError,
    NonFiniteError,
    PlanError,
)
from hvdkit.registration import register_layers as _register_layers

if TYPE_CHECKING:
    from hvdkit import callbacks, checkpoint, data, layers, schedules
    from hvdkit.cluster import Cluster, busy, init, is_chief, local_rank, local_size, rank, shutdown, size
    from hvdkit.collectives import (
        Adasum,
        Average,
        Handle,
        Max,
        Min,
        ProcessSet,
        Product,
        Sum,
        allgather,
        allgather_async,
        allgather_object,
        allreduce,
        allreduce_async,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_async,
        broadcast_object,
        cross_set,
        grouped_allgather,
        grouped_allreduce,
        grouped_allreduce_async,
        grouped_reducescatter,
        join,
        local_rank_op,
        local_set,
        local_size_op,
        rank_op,
        reducescatter,
        reducescatter_async,
        size_op,
        wait,
    )
    from hvdkit.optimizer.average import average_gradients
    from hvdkit.optimizer.distributed import DistributedOptimizer
    from hvdkit.optimizer.loading import load_model
    from hvdkit.optimizer.local_variables import register_local_variables
    from hvdkit.optimizer.tape import DistributedGradientTape, PartialDistributedGradientTape
    from hvdkit.sharding.partitioned import PartitionedVariable
    from hvdkit.sharding.plan import plan_tables
    from hvdkit.sharding.variables import broadcast_variables, compare_variables
    from hvdkit.supervisor import Supervisor
    from hvdkit.training import evaluate, fit, predict

_HOMES = {
    "hvdkit.cluster": ("Cluster", "busy", "init", "is_chief", "local_rank", "local_size", "rank", "shutdown", "size"),
    "hvdkit.collectives": (
        "Adasum",
        "Average",
        "Handle",
        "Max",
        "Min",
        "ProcessSet",
        "Product",
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
    ),
    "hvdkit.optimizer.average": ("average_gradients",),
    "hvdkit.optimizer.distributed": ("DistributedOptimizer",),
    "hvdkit.optimizer.loading": ("load_model",),
    "hvdkit.optimizer.local_variables": ("register_local_variables",),
    "hvdkit.optimizer.tape": ("DistributedGradientTape", "PartialDistributedGradientTape"),
    "hvdkit.sharding.partitioned": ("PartitionedVariable",),
    "hvdkit.sharding.plan": ("plan_tables",),
    "hvdkit.sharding.variables": ("broadcast_variables", "compare_variables"),
    "hvdkit.supervisor": ("Supervisor",),
    "hvdkit.training": ("evaluate", "fit", "predict"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("callbacks", "checkpoint", "data", "layers", "schedules")

__all__ = [
    "Adasum",
    "Average",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "CollectiveMismatchError",
    "CorruptCheckpointError",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Handle",
    "HvdkitError",
    "Max",
    "Min",
    "NonFiniteError",
    "PartialDistributedGradientTape",
    "PartitionedVariable",
    "PlanError",
    "ProcessSet",
    "Product",
    "Sum",
    "Supervisor",
    "__version__",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_variables",
    "busy",
    "callbacks",
    "checkpoint",
    "compare_variables",
    "cross_set",
    "data",
    "evaluate",
    "fit",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "init",
    "is_chief",
    "join",
    "layers",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_set",
    "local_size",
    "local_size_op",
    "plan_tables",
    "predict",
    "rank",
    "rank_op",
    "reducescatter",
    "reducescatter_async",
    "register_local_variables",
    "schedules",
    "shutdown",
    "size",
    "size_op",
    "wait",
]

_register_layers()
_prepare_import()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hvdkit.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hvdkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
