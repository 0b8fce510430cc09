"""Records which rows of a gradient came from which rank.

In the gradient of rows that several ranks read, a row can occur up to N times, but only once in each rank's part. With
the parts known, an update can apply them one after another, without searching for duplicate rows.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from hvdkit import cluster


class Runs(NamedTuple):
    """The rows that each rank read, in rank order.

    Attributes:
        ids: local rows, ``[m]``; distinct within each rank's part.
        counts: number of rows that each rank read, ``[N]``.
    """

    ids: tf.Tensor
    counts: tf.Tensor


class LastLookup:
    """Passes the runs of the last lookup of a shard from the lookup to the update of its rows.

    Both access it as ``Shard.lookup``. The runs cannot be attached to the gradient: TensorFlow computes the gradient of
    a read as IndexedSlices with copies of the ids, and a custom gradient of a read would read the whole table inside
    graphs. So the update compares the gradient's ids with those of the runs.
    """

    def __init__(self) -> None:
        self._runs: Runs | None = None

    def note(self, runs: Runs) -> None:
        """Store ``runs``, replacing those of an earlier lookup."""
        self._runs = runs

    def take(self) -> Runs | None:
        """Remove the runs; return them if they were created in the caller's context: eager mode, or the same graph."""
        runs, self._runs = self._runs, None  # do not keep their graph in memory
        if runs is None or tf.executing_eagerly() != hasattr(runs.ids, "numpy"):
            return None
        same = tf.executing_eagerly() or runs.ids.graph is tf.compat.v1.get_default_graph()
        return runs if same and cluster.size() > 1 else None


def split_runs(values: tf.Tensor, runs: Runs) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return each rank's ids and values."""
    size = cluster.size()
    ids, parts = tf.split(runs.ids, runs.counts, num=size), tf.split(values, runs.counts, num=size)
    return list(zip(ids, parts, strict=True))
