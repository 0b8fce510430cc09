"""Ranks, mesh and devices of a job, and the start of Horovod and MPI.

:func:`init` reads the launcher's variables, sets the environment, starts MPI and Horovod, binds this rank to its cores
and GPU, and returns a :class:`Cluster`. Later, ranks exchange Python objects (:func:`exchange`) and agree on values.
Start with world.py, which calls the others in this order:

    settings.py    the environment variables of MPI and Horovod; some come from rings.py or a file (tuned.py)
    engine.py      starts Horovod and MPI; tensorflow_loading.py loads TensorFlow before them
    devices.py     threads, core and GPU of this rank
    rank_facts.py  what ranks exchange at the start; mesh.py: the mesh and its groups
    exchange.py    exchanges Python objects among ranks; agreement.py: compares values of all ranks
    call_order.py  one thread calls a rank's eager collectives, one at a time
    progress.py    records steps and collectives, for the sentinel and for a profile
    lone_training.py  reports ranks that train without combining gradients
    logs.py        log lines with ranks; log_filter.py: drops TensorFlow's startup messages
"""

from hvdkit.cluster.mesh import DATA, Group
from hvdkit.cluster.world import (
    Cluster,
    alone,
    call_order,
    cluster,
    data_group,
    exchange,
    group,
    horovod,
    init,
    is_chief,
    is_initialized,
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
    "data_group",
    "exchange",
    "group",
    "horovod",
    "init",
    "is_chief",
    "is_initialized",
    "local_rank",
    "local_size",
    "make_groups",
    "rank",
    "shutdown",
    "size",
]
