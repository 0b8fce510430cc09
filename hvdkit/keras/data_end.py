"""Detect data that end at different steps on different ranks: raise on every rank instead of waiting forever.

For data of unknown length, every rank sends 1 before each step and 0 after its last step. The sum must be N in every
step and 0 at the end. The exchange is a few bytes per step. Known lengths are compared in advance instead.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import graph_recorder
from hvdkit.errors import CollectiveMismatchError, describe

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Tensors

_NAME = "hvdkit.ranks_with_a_batch"
_REMEDY = "give every rank the same data; seed filters, shuffles and sampling"


def require_batch_on_every_rank(data: Tensors, rows: tf.Tensor) -> Tensors:
    """Return the batch once every rank has one; the step must use the returned batch.

    ``rows`` is the number of rows of the global batch, a scalar that becomes available with the batch.

    Raises:
        tf.errors.InvalidArgumentError: at execution, if the data of another rank have ended.
    """
    if cluster.size() == 1:
        return data
    count = _sum(tf.cast(rows >= 0, tf.float32))
    message = describe(
        "x", "data that ended earlier on another rank", "the same number of batches on every rank", _REMEDY
    )
    check = tf.debugging.Assert(tf.equal(count, cluster.size()), [message])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.nest.map_structure(tf.identity, data)


def report_end_of_data() -> None:
    """Report that this rank has finished its steps. Every rank must call it.

    Raises:
        CollectiveMismatchError: another rank has more batches.
    """
    if cluster.size() == 1:
        return
    # Use a graph, as the step does: Horovod does not match graph ops with eager ops.
    if float(_sum_in_graph()(tf.zeros([]))) > 0:
        got = f"data that ended on rank {cluster.rank()} before those of other ranks"
        raise CollectiveMismatchError(describe("x", got, "the same number of batches on every rank", _REMEDY))


@cache
def _sum_in_graph() -> tf.types.experimental.PolymorphicFunction:
    """Return :func:`_sum` as a graph, created once: TensorFlow warns of functions that are created again and again."""
    return tf.function(_sum, autograph=False)


def _sum(value: tf.Tensor) -> tf.Tensor:
    """Return the sum over ranks. It is recorded: otherwise the watchdog would not know that this rank waits here."""
    from horovod.tensorflow.mpi_ops import Sum, _allreduce

    total: tf.Tensor = graph_recorder.run(
        lambda ready: _allreduce(ready[0], name=_NAME, op=Sum, ignore_name_scope=True),
        [value],
        op_name=_NAME,
        label=_NAME,
        shown=[value],
        uneven=False,
        ranks=None,
    )
    return total
