"""Which rows of a gradient came from which rank.

A gradient of rows that several ranks read has a row up to N times, but each rank's part has it once. An update that
knows the parts can take one after the other, without looking for equal rows first.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from hvdkit import cluster


class Runs(NamedTuple):
    """Rows that the ranks read, one rank after another.

    Attributes:
        ids: local rows, ``[m]``; distinct within each rank's part.
        counts: how many each rank read, ``[N]``.
    """

    ids: tf.Tensor
    counts: tf.Tensor


class LastLookup:
    """The runs of the last lookup of a shard, from the lookup to the update of its rows.

    Both have it from the shard's ``Shard.lookup``. It cannot travel with the gradient: TensorFlow makes the gradient of
    a read itself, as IndexedSlices with copies of the ids, and a custom gradient of a read would read the whole table
    inside graphs. So the update compares the gradient's ids with those of the runs.
    """

    def __init__(self) -> None:
        self._runs: Runs | None = None

    def note(self, runs: Runs) -> None:
        """Replace what was noted before."""
        self._runs = runs

    def take(self) -> Runs | None:
        """Return and forget the runs if they were made where this is called: in eager mode, or in this graph."""
        runs, self._runs = self._runs, None  # they would keep their graph in memory
        if runs is None or tf.executing_eagerly() != hasattr(runs.ids, "numpy"):
            return None
        same = tf.executing_eagerly() or runs.ids.graph is tf.compat.v1.get_default_graph()
        return runs if same and cluster.size() > 1 else None


def split_runs(values: tf.Tensor, runs: Runs) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return each rank's ids and values."""
    size = cluster.size()
    ids, parts = tf.split(runs.ids, runs.counts, num=size), tf.split(values, runs.counts, num=size)
    return list(zip(ids, parts, strict=True))
