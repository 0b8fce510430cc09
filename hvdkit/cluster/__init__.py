"""This process's rank, mesh and device, and the start of Horovod and MPI."""

from hvdkit.cluster.mesh import DATA, Group
from hvdkit.cluster.world import (
    Cluster,
    alone,
    call_order,
    cluster,
    exchange,
    group,
    horovod,
    init,
    is_chief,
    local_rank,
    local_size,
    make_groups,
    rank,
    shutdown,
    size,
)
from hvdkit.watchdog.busy import busy

__all__ = [
    "DATA",
    "Cluster",
    "Group",
    "alone",
    "busy",
    "call_order",
    "cluster",
    "exchange",
    "group",
    "horovod",
    "init",
    "is_chief",
    "local_rank",
    "local_size",
    "make_groups",
    "rank",
    "shutdown",
    "size",
]
