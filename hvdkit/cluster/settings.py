"""Settings that must be in place before MPI and TensorFlow start: waiting, fusion, threads, devices.

The user's settings take precedence: a variable that is already in the environment, or a thread count already set in
TensorFlow, is not changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hvdkit.cluster import rings
from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.tuned import settings_of
from hvdkit.errors import describe
from hvdkit.machine.cores import affinity, available_cores
from hvdkit.machine.launcher import LaunchedRank
from hvdkit.watchdog.settings import HEARTBEAT, PATIENCE, STALL, UNWIND, seconds

_BEFORE_MPI = {
    # Open MPI waits by spinning: Horovod's background thread would take a core away from computation.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Reduce each group of gradients separately. Fusing groups that happen to be ready at the same time would make the
    # order of additions, and so the last bit of the result, depend on timing.
    "HOROVOD_DISABLE_GROUP_FUSION": "1",
    # Horovod caches the ranks' agreements by tensor name. If more names were in use than fit into the cache, jobs with
    # several buckets aborted or failed in MPI's allreduce: 1600 names at the default of 1024, 60 at 16 and 64. This did
    # not happen at this size.
    "HOROVOD_CACHE_CAPACITY": "131072",
}
# Milliseconds between Horovod's checks for finished gradients; a step ends by waiting for one. Each check synchronizes
# with all other ranks, which takes time from computation if ranks share cores.
_CYCLE, _CYCLE_ON_SHARED_CORES = "0.2", "1"
# The overhead of smaller buckets exceeds the waiting time that they save; a single bucket could not be sent before all
# gradients are computed. Between hosts, the links are idle at the beginning of every message.
_BUCKET, _BUCKET_BYTES, _BUCKET_BYTES_BETWEEN_HOSTS = "HVDKIT_BUCKET_BYTES", 8 * 1024 * 1024, 32 * 1024 * 1024
# Horovod's own stall limit, which does not write stacks, takes effect after the watchdog's.
_LATER_SECONDS, _MUCH_LATER_SECONDS = 60, 86_400
_THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def set_environment(launched: LaunchedRank, *, timeline: bool = False) -> None:
    """Set the variables that MPI and Horovod read when they start, unless the user has set them.

    Args:
        launched: the rank and size set by the launcher.
        timeline: allow Horovod's timeline to be started later.
    """
    cycle = _CYCLE if launched.local_size <= available_cores() else _CYCLE_ON_SHARED_CORES
    wanted = _BEFORE_MPI | {"HOROVOD_CYCLE_TIME": cycle}
    if timeline:
        wanted["HOROVOD_TIMELINE"] = "DYNAMIC"
    if launched.on_several_hosts:
        wanted[_BUCKET] = str(_BUCKET_BYTES_BETWEEN_HOSTS)
        if launched.controller == "mpi" and not rings.chosen(os.environ):
            wanted |= rings.variables()
    for name, value in (wanted | tuned()).items():
        os.environ.setdefault(name, value)


def set_stall_limit() -> None:
    """Set Horovod's own limit for a collective that some rank never enters, unless the user has set it."""
    patience, _ = seconds(PATIENCE), seconds(UNWIND)
    os.environ.setdefault(PATIENCE, str(patience))  # a second world uses the value of the first
    # Above the watchdog's limit: the watchdog waits for ranks that work or are busy, but Horovod would not.
    later = _MUCH_LATER_SECONDS if seconds(HEARTBEAT) else _LATER_SECONDS
    os.environ.setdefault(STALL, str(round(patience) + later if patience else 0))


def tuned() -> dict[str, str]:
    """Return the settings from the file of ``hvdkit tune`` that HVDKIT_TUNED names; empty if it is not set.

    Raises:
        ValueError: the file does not exist, or was not written by ``hvdkit tune``.
    """
    file = os.environ.get("HVDKIT_TUNED", "")
    return settings_of(Path(file)) if file else {}


def bucket_bytes() -> int:
    """Return the minimum bytes of a bucket of gradients: HVDKIT_BUCKET_BYTES, or 8 MiB.

    Raises:
        ValueError: the variable is not a positive integer.
    """
    text = os.environ.get(_BUCKET, str(_BUCKET_BYTES))
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(describe(_BUCKET, text, "a number of bytes, at least 1", "unset it, or write e.g. 8388608"))
    return int(text)


def core_share(cores: int, mine: frozenset[int], neighbours: Sequence[frozenset[int]]) -> int:
    """Return this rank's number of threads: its cores divided by the number of local ranks that share them, at least 1.

    Args:
        cores: number of cores this rank may use, after any container quota.
        mine: this rank's affinity.
        neighbours: the affinity of every rank on this host, including this one. They are disjoint if the launcher binds
            each rank to its own cores, which are then not divided.

    Example:
        >>> core_share(4, frozenset(range(4)), [frozenset(range(4))] * 2)
        2
    """
    sharing = sum(bool(mine & other) for other in neighbours)
    return max(1, cores // max(1, sharing))


def share_cores(neighbours: Sequence[frozenset[int]]) -> int | None:
    """Set TensorFlow's threads to this rank's share of the cores; return it, or None if the user has set them."""
    import tensorflow as tf

    threading = tf.config.threading
    chosen = any(os.environ.get(name) for name in _THREAD_VARIABLES)
    if chosen or threading.get_intra_op_parallelism_threads() or threading.get_inter_op_parallelism_threads():
        return None
    share = core_share(available_cores(), affinity(), neighbours)
    try:
        threading.set_intra_op_parallelism_threads(share)
        # Horovod's kernels return immediately: a second thread only lets independent branches interleave.
        threading.set_inter_op_parallelism_threads(max(2, share))
    except RuntimeError:
        get_logger().warning(
            "threads: TensorFlow was already running when hk.init() was called, so its ranks compete for cores; "
            "call hk.init() before the first TensorFlow operation."
        )
        return None
    return share


def core_of(local_rank: int, cores: int, neighbours: Sequence[frozenset[int]]) -> int | None:
    """Return the core to which this rank should be bound, or None to leave it to the scheduler.

    If ranks share the cores evenly, a core that temporarily runs one rank too many makes all ranks wait.

    Args:
        local_rank: this rank's local rank.
        cores: number of cores this rank may use, after any container quota.
        neighbours: the affinity of every rank on this host, by local rank.

    Example:
        >>> [core_of(n, 2, [frozenset({0, 1})] * 4) for n in range(4)]
        [0, 1, 0, 1]
        >>> core_of(0, 2, [frozenset({0, 1})] * 3) is None  # two on one core: the scheduler may let them take turns
        True
    """
    mine = neighbours[local_rank]
    alike = [number for number, other in enumerate(neighbours) if other == mine]
    apart = len(alike) == sum(bool(mine & other) for other in neighbours)
    if not apart or cores < len(mine) or len(mine) == 1 or len(alike) <= len(mine) or len(alike) % len(mine):
        return None
    return sorted(mine)[alike.index(local_rank) % len(mine)]


def keep_to_core(local_rank: int, local_size: int, neighbours: Sequence[frozenset[int]]) -> int | None:
    """Bind this thread, and threads that it starts, to one core if ranks outnumber their shared cores; return the core.

    With 4 ranks on 2 cores, left to the scheduler, a step of benchmarks/dense.py took 119 to 138 ms instead of 88 ms in
    4 of 21 runs, as long as 3 ranks on one core would take. Bound to cores, this happened in 0 of 12 runs.
    """
    # If several hosts have the same name, it is unknown which ranks share cores.
    if len(neighbours) != local_size or not hasattr(os, "sched_setaffinity"):
        return None
    core = core_of(local_rank, available_cores(), neighbours)
    if core is not None:
        os.sched_setaffinity(0, {core})
    return core


def pin_device(local_rank: int, local_size: int) -> str | None:
    """Make one GPU visible to this rank, by ``local_rank``; return its name, or None on a host without GPUs."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    if local_size > len(gpus) and local_rank == 0:
        get_logger().warning(
            "device: %d ranks share %d GPUs on this host; start at most one rank per GPU.",
            local_size,
            len(gpus),
        )
    gpu = gpus[local_rank % len(gpus)]
    try:
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        get_logger().warning(
            "device: TensorFlow was already running when hk.init() was called, so this rank holds every GPU; "
            "call hk.init() before the first TensorFlow operation."
        )
        return None
    return gpu.name
