"""Record which rank read which rows in the last lookup, for the update of these rows.

If several ranks read a row, it occurs up to N times in the gradient, but only once in each rank's part. An update that
knows the parts can apply them one after another, without searching for duplicate rows.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from hvdkit import cluster


class RowsByRank(NamedTuple):
    """The rows that ranks read, in rank order.

    Attributes:
        ids: local rows, ``[m]``; distinct within each rank's part.
        counts: number of rows that each rank read, ``[N]``.
    """

    ids: tf.Tensor
    counts: tf.Tensor


class LastLookup:
    """Passes :class:`RowsByRank` from the last lookup of a shard to the update of its rows.

    Both access it as ``Shard.lookup``. The rows cannot be attached to the gradient: TensorFlow computes the gradient of
    a read as IndexedSlices with copies of the ids, and a custom gradient of a read would read the whole table inside
    graphs. So the update checks that the gradient has the same ids.
    """

    def __init__(self) -> None:
        self._rows: RowsByRank | None = None

    def record(self, rows: RowsByRank) -> None:
        """Store ``rows``, replacing those of an earlier lookup."""
        self._rows = rows

    def pop(self) -> RowsByRank | None:
        """Remove the rows; return them if they were recorded in the caller's context: eager mode, or the same graph."""
        # do not keep their graph in memory
        rows = self._rows
        self._rows = None
        if rows is None or tf.executing_eagerly() != hasattr(rows.ids, "numpy"):
            return None
        same = tf.executing_eagerly() or rows.ids.graph is tf.compat.v1.get_default_graph()
        return rows if same and cluster.size() > 1 else None


def split_by_rank(values: tf.Tensor, rows: RowsByRank) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return the ids that each rank read, with their ``values``."""
    ids, parts = (tf.split(x, rows.counts, num=cluster.size()) for x in (rows.ids, values))
    return list(zip(ids, parts, strict=True))
