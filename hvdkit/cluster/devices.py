"""The threads, core and GPU of this rank.

The user's settings take precedence: a thread count that is already set in TensorFlow is not changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from hvdkit.cluster.logs import get_logger
from hvdkit.machine.cores import affinity, available_cores

_THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def thread_count(cores: int, mask: frozenset[int], masks: Sequence[frozenset[int]]) -> int:
    """Return this rank's number of threads: its cores divided by the number of local ranks that share them, at least 1.

    Args:
        cores: number of cores this rank may use, after any container quota.
        mask: this rank's affinity.
        masks: the affinity of every rank on this host, including this one. They are disjoint if the launcher binds each
            rank to its own cores, which are then not divided.

    Example:
        >>> thread_count(4, frozenset(range(4)), [frozenset(range(4))] * 2)
        2
    """
    sharing_ranks = sum(bool(mask & other) for other in masks)
    return max(1, cores // max(1, sharing_ranks))


def set_threads(masks: Sequence[frozenset[int]]) -> None:
    """Divide the cores of this host among TensorFlow's threads of its ranks, unless the user has set their number."""
    import tensorflow as tf

    threading = tf.config.threading
    by_variable = any(os.environ.get(name) for name in _THREAD_VARIABLES)
    if by_variable or threading.get_intra_op_parallelism_threads() or threading.get_inter_op_parallelism_threads():
        return
    threads = thread_count(available_cores(), affinity(), masks)
    try:
        threading.set_intra_op_parallelism_threads(threads)
        # Horovod's kernels return immediately: a second thread only lets independent branches interleave.
        threading.set_inter_op_parallelism_threads(max(2, threads))
    except RuntimeError:
        get_logger().warning(
            "threads: TensorFlow was already running when hk.init() was called, so its ranks compete for cores; "
            "call hk.init() before the first TensorFlow operation."
        )


def core_of(local_rank: int, cores: int, masks: Sequence[frozenset[int]]) -> int | None:
    """Return the core to which this rank should be bound, or None to leave the choice to the scheduler.

    A rank is bound if ranks outnumber their cores and can be divided evenly among them: then a core that temporarily
    runs one rank too many would make all ranks wait.

    Args:
        local_rank: this rank's local rank.
        cores: number of cores this rank may use, after any container quota.
        masks: the affinity of every rank on this host, by local rank.

    Example:
        >>> [core_of(n, 2, [frozenset({0, 1})] * 4) for n in range(4)]
        [0, 1, 0, 1]
        >>> core_of(0, 2, [frozenset({0, 1})] * 3) is None  # the scheduler moves the ranks from core to core
        True
    """
    mask = masks[local_rank]
    ranks = [rank for rank, other in enumerate(masks) if other == mask]
    overlaps_others = any(mask & other for other in masks if other != mask)
    if overlaps_others or cores < len(mask) or len(mask) <= 1 or len(ranks) <= len(mask) or len(ranks) % len(mask):
        return None
    return sorted(mask)[ranks.index(local_rank) % len(mask)]


def bind_to_core(local_rank: int, local_size: int, masks: Sequence[frozenset[int]]) -> None:
    """Bind this thread, and threads that it starts, to one core if ranks outnumber their cores: see :func:`core_of`.

    With 4 ranks on 2 cores, left to the scheduler, a step of benchmarks/dense.py took 119 to 138 ms instead of 88 ms in
    4 of 21 runs, as long as 3 ranks on one core would take. Bound to cores, this happened in 0 of 12 runs.
    """
    # If several hosts have the same name, it is unknown which ranks share cores.
    if len(masks) != local_size or not hasattr(os, "sched_setaffinity"):
        return
    core = core_of(local_rank, available_cores(), masks)
    if core is not None:
        os.sched_setaffinity(0, {core})


def select_gpu(local_rank: int, local_size: int) -> None:
    """Make one GPU of this host, if there are any, visible to this rank, by ``local_rank``."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
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
