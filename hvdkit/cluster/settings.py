"""What must be set before MPI and TensorFlow start: waiting, fusion, threads, devices.

Every setting here yields to the person: a variable that is already in the environment, or a thread count that
was already given to TensorFlow, stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hvdkit import rings
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import describe
from hvdkit.machine.cores import affinity, available_cores
from hvdkit.machine.launcher import Promise
from hvdkit.tuned import settings_of
from hvdkit.watchdog.settings import HEARTBEAT, PATIENCE, STALL, UNWIND, seconds

_BEFORE_MPI = {
    # Open MPI waits by spinning; Horovod's background thread then eats the core that should compute.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Each group of gradients is reduced by itself. Fusing groups that happen to be ready together makes the
    # order of additions, and so the last bit of the result, depend on timing.
    "HOROVOD_DISABLE_GROUP_FUSION": "1",
    # Horovod remembers what all ranks agreed on, by tensors' names. With more in use than fit, jobs of several buckets
    # were seen to abort, or to fail in MPI's allreduce: 1600 at its own 1024, 60 at 16 and 64; none at this size.
    "HOROVOD_CACHE_CAPACITY": "131072",
}
# Horovod's thread looks for finished gradients once in so many milliseconds, and a step ends by waiting for it. Each
# look waits for those of all other ranks: where ranks share cores, it takes them from whoever computes.
_CYCLE, _CYCLE_ON_SHARED_CORES = "0.2", "1"
# Smaller messages cost more than the wait that they spare; in one message nothing travels before all is computed.
# Between hosts every message begins with a pause, in which the links are idle.
_BUCKET, _BUCKET_BYTES, _BUCKET_BYTES_BETWEEN_HOSTS = "HVDKIT_BUCKET_BYTES", 8 * 1024 * 1024, 32 * 1024 * 1024
# Horovod's own limit, which writes no stacks, serves if there is no watchdog.
_LATER_SECONDS, _MUCH_LATER_SECONDS = 60, 86_400
_THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def set_environment(promise: Promise, *, timeline: bool = False) -> None:
    """Set the variables that MPI and Horovod read when they start, unless the person has set them.

    Args:
        promise: what the launcher said.
        timeline: let Horovod's timeline be started later.
    """
    cycle = _CYCLE if promise.local_size <= available_cores() else _CYCLE_ON_SHARED_CORES
    wanted = _BEFORE_MPI | {"HOROVOD_CYCLE_TIME": cycle}
    if timeline:
        wanted["HOROVOD_TIMELINE"] = "DYNAMIC"
    if promise.on_several_hosts:
        wanted[_BUCKET] = str(_BUCKET_BYTES_BETWEEN_HOSTS)
        if promise.controller == "mpi" and not rings.chosen(os.environ):
            wanted |= rings.variables()
    for name, value in (wanted | tuned()).items():
        os.environ.setdefault(name, value)


def set_stall_limit() -> None:
    """Set Horovod's own limit for a collective that some rank never enters, unless the user has."""
    patience, _ = seconds(PATIENCE), seconds(UNWIND)
    os.environ.setdefault(PATIENCE, str(patience))  # a second world uses the value of the first one
    # The watchdog waits for ranks that work, or are busy; Horovod would not. It still ends a job without a watchdog.
    later = _MUCH_LATER_SECONDS if seconds(HEARTBEAT) else _LATER_SECONDS
    os.environ.setdefault(STALL, str(round(patience) + later if patience else 0))


def tuned() -> dict[str, str]:
    """Return the settings in the file of ``hvdkit tune`` that HVDKIT_TUNED names, if it does.

    Raises:
        ValueError: there is no such file, or it is another one.
    """
    file = os.environ.get("HVDKIT_TUNED", "")
    return settings_of(Path(file)) if file else {}


def bucket_bytes() -> int:
    """Return how many bytes of gradients travel together at least: HVDKIT_BUCKET_BYTES, or 8 MiB.

    Raises:
        ValueError: the variable is no whole number of at least 1.
    """
    text = os.environ.get(_BUCKET, str(_BUCKET_BYTES))
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(describe(_BUCKET, text, "a number of bytes, at least 1", "unset it, or write e.g. 8388608"))
    return int(text)


def core_share(cores: int, mine: frozenset[int], neighbours: Sequence[frozenset[int]]) -> int:
    """Return this rank's threads: its cores divided by the local ranks that run on the same ones, at least 1.

    Args:
        cores: cores this rank may use, after any container quota.
        mine: this rank's affinity.
        neighbours: the affinity of every rank on this host, this one included. A launcher that binds each
            rank to cores of its own makes them disjoint, and then nothing is divided.

    Example:
        >>> core_share(4, frozenset(range(4)), [frozenset(range(4))] * 2)
        2
    """
    sharing = sum(bool(mine & other) for other in neighbours)
    return max(1, cores // max(1, sharing))


def share_cores(neighbours: Sequence[frozenset[int]]) -> int | None:
    """Give TensorFlow this rank's share of the host's cores; return it, or None where the person has chosen."""
    import tensorflow as tf

    threading = tf.config.threading
    chosen = any(os.environ.get(name) for name in _THREAD_VARIABLES)
    if chosen or threading.get_intra_op_parallelism_threads() or threading.get_inter_op_parallelism_threads():
        return None
    share = core_share(available_cores(), affinity(), neighbours)
    try:
        threading.set_intra_op_parallelism_threads(share)
        # Horovod's kernels return at once, so a second runner only lets independent branches interleave.
        threading.set_inter_op_parallelism_threads(max(2, share))
    except RuntimeError:
        get_logger().warning(
            "threads: TensorFlow was already running when hk.init() was called, so its ranks compete for cores; "
            "call hk.init() before the first TensorFlow operation."
        )
        return None
    return share


def core_of(local_rank: int, cores: int, neighbours: Sequence[frozenset[int]]) -> int | None:
    """Return the core that this rank should keep to, or None where the scheduler does as well.

    Where ranks share every core evenly, a core that has one rank too many for a while makes all of them wait.

    Args:
        local_rank: this rank's.
        cores: this rank may use, after any container quota.
        neighbours: the affinity of every rank on this host by local rank.

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
    """Have what this thread starts from now on run on one core, where more ranks than cores share them; return it.

    Left to the scheduler, 4 ranks on 2 cores took 119 to 138 ms for a step of benchmarks/dense.py instead of 88 in 4 of
    21 runs, which is what 3 on one core would take; kept to their cores, in none of 12.
    """
    # Hosts of one name cannot be told apart: then it is not known who shares what.
    if len(neighbours) != local_size or not hasattr(os, "sched_setaffinity"):
        return None
    core = core_of(local_rank, available_cores(), neighbours)
    if core is not None:
        os.sched_setaffinity(0, {core})
    return core


def pin_device(local_rank: int, local_size: int) -> str | None:
    """Make this rank see one GPU, chosen by ``local_rank``; return its name, or None on a host without GPUs."""
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
