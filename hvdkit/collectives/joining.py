"""Join: ranks that run out of data early contribute zeros until all ranks have joined."""

from __future__ import annotations

import threading

import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.progress import collective
from hvdkit.collectives.call_checks import JOIN, Call
from hvdkit.errors import HvdkitError, describe


def join() -> int:
    """Wait until every rank has joined; until then, contribute zeros to the allreduces of the others.

    Use it after loops of different lengths. Joined ranks count in averages as zeros, as in Horovod. To average over
    examples instead, pass ``weight`` to ``hk.average_gradients``, with weight 0 on ranks without data. The other ranks
    may call ``hk.allreduce`` and ``hk.grouped_allreduce`` (Sum and Average, eager and in graphs),
    ``hk.average_gradients`` of dense gradients in graphs, and the barrier.

    Returns:
        The last rank that joined.

    Raises:
        HvdkitError: MPI is not available. Under Gloo, ranks compare their calls through Horovod, and a joined rank
            cannot answer.
        ClusterError: a rank left the job. A rank that calls an eager collective that joined ranks cannot take part in
            gets a CollectiveMismatchError; in a graph, Horovod's error.

    Examples:
        Ranks have different numbers of batches:

        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> for batch in range(hk.rank() + 1):
        ...     loss = hk.allreduce(1.0, hk.Sum)  # joined ranks add 0
        >>> hk.join() == hk.size() - 1
        True
    """
    if cluster.size() == 1:
        return 0
    if not cluster.exchange().over_mpi:
        remedy = "start under MPI, or continue with hk.average_gradients(..., weight=0)"
        raise HvdkitError(describe("join", "a job under Gloo", "MPI with mpi4py, to compare the ranks' calls", remedy))
    last: list[int] = []

    def join_horovod() -> None:
        from horovod.tensorflow import mpi_ops

        with tf.device("/CPU:0"):
            last.append(int(mpi_ops.join()))

    # Horovod's join blocks until all ranks have joined, and serves collectives of graphs and of large tensors.
    thread = threading.Thread(target=join_horovod, name="hvdkit-join", daemon=True)
    thread.start()
    # A rank that calls an unsupported collective gets the error itself, and may still join.
    while any(getattr(call, "kind", None) != JOIN for call in cluster.exchange().allgather(Call(JOIN), JOIN)):
        pass
    with collective(JOIN):
        thread.join()
    return last[0]
