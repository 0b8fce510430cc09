"""Who am I: ranks, chief, mesh, device; and the start of the engines."""

from hvdkit.cluster.world import (
    Cluster,
    alone,
    cluster,
    exchange,
    horovod,
    init,
    is_chief,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Cluster",
    "alone",
    "cluster",
    "exchange",
    "horovod",
    "init",
    "is_chief",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
