"""Ranks whose data end at different steps: an error on each of them, where the others would wait for ever.

Before a step on data of unknown length every rank sends a 1, and after its last step a 0. The sum is N in every step
and 0 at the end. The exchange is a few bytes per step. Data of known length are compared before, and need none.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit import cluster
from hvdkit.errors import CollectiveMismatchError, describe

_NAME = "hvdkit.ranks_with_a_batch"
_REMEDY = "give every rank the same data; seed filters, shuffles and sampling"


def when_all_have_a_batch(data: Any, rows: tf.Tensor) -> Any:
    """Return a batch once every rank has one; the step must use what is returned.

    Args:
        data: the batch.
        rows: of the global batch; a scalar that is there when the batch is.

    Raises:
        tf.errors.InvalidArgumentError: when it runs, if another rank's data have ended.
    """
    if cluster.size() == 1:
        return data
    count = _sum(tf.cast(rows >= 0, tf.float32))
    text = describe("x", "data that have ended on another rank", "as many batches on every rank", _REMEDY)
    check = tf.debugging.Assert(tf.equal(count, cluster.size()), [text])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.nest.map_structure(tf.identity, data)


def at_end_of_data() -> None:
    """Note that this rank does no more steps. Every rank calls it.

    Raises:
        CollectiveMismatchError: another rank has a further batch.
    """
    if cluster.size() == 1:
        return
    # In a graph, as a step's: Horovod does not match it with an op of eager mode.
    counted = tf.function(_sum, autograph=False)
    if float(counted(tf.zeros([]))) > 0:
        got = f"data that have ended on rank {cluster.rank()} before those of other ranks"
        raise CollectiveMismatchError(describe("x", got, "as many batches on every rank", _REMEDY))


def _sum(value: tf.Tensor) -> tf.Tensor:
    from horovod.tensorflow.mpi_ops import Sum, _allreduce

    return _allreduce(value, name=_NAME, op=Sum, ignore_name_scope=True)
