"""Ranks that run out of data before others: they join, and contribute zeros until all have."""

from __future__ import annotations

import threading

import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.progress import collective
from hvdkit.collectives.agreement import JOIN, Call
from hvdkit.errors import HvdkitError, describe


def join() -> int:
    """Wait until every rank has joined; until then, contribute zeros to the allreduces of the others.

    For loops of unequal length. Ranks that have joined count in averages, with zeros, as in Horovod; to average over
    the examples instead, pass ``weight`` to ``hk.average_gradients``, and weight 0 on ranks without data. Others may
    call ``hk.allreduce`` and ``hk.grouped_allreduce`` (Sum and Average, eager and in graphs), ``hk.average_gradients``
    of dense gradients in graphs, and the barrier.

    Returns:
        The last rank that joined.

    Raises:
        HvdkitError: there is no MPI. Under Gloo the ranks compare their calls through Horovod itself, where a rank that
            has joined cannot answer.
        ClusterError: a rank left the job. A rank that calls an eager collective in which joined ranks cannot take part
            gets a CollectiveMismatchError; in a graph, Horovod's error.

    Example::

        for batch in this_rank_s_batches:
            train_step(batch)
        hk.join()
    """
    if cluster.size() == 1:
        return 0
    if not cluster.exchange().over_mpi:
        remedy = "start under MPI, or go on with hk.average_gradients(..., weight=0)"
        raise HvdkitError(describe("join", "a job under Gloo", "MPI with mpi4py, for the ranks' comparison", remedy))
    last: list[int] = []
    # Horovod's own part blocks until all ranks have joined, and serves the collectives of graphs and large tensors.
    native = threading.Thread(target=lambda: last.append(_join_natively()), name="hvdkit-join", daemon=True)
    native.start()
    # Others find out themselves if they call what this rank cannot take part in, and may still join.
    while any(getattr(call, "kind", None) != JOIN for call in cluster.exchange().allgather(Call(JOIN), JOIN)):
        pass
    with collective(JOIN):
        native.join()
    return last[0]


def _join_natively() -> int:
    from horovod.tensorflow import mpi_ops

    with tf.device("/CPU:0"):
        return int(mpi_ops.join())
