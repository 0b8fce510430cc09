"""Who am I: ranks, chief, mesh, device; and the start of the engines."""

from hvdkit.cluster.world import (
    Cluster,
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
