"""Which rows of a gradient came from which rank.

A gradient of rows that several ranks read has a row up to N times, but each rank's part has it once. Whoever knows the
parts can update by one after the other, without looking for equal rows first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from hvdkit import cluster

_NOTE = "_hvdkit_runs"


class Runs(NamedTuple):
    """Rows that the ranks read, one rank after another.

    Attributes:
        ids: local rows, ``[m]``; distinct within each rank's part.
        counts: how many each rank read, ``[N]``.
    """

    ids: tf.Tensor
    counts: tf.Tensor


def note_runs(variable: tf.Variable, ids: tf.Tensor, counts: tf.Tensor) -> None:
    """Note the last lookup of ``variable``."""
    setattr(variable, _NOTE, Runs(ids, counts))


def take_runs(variable: Any) -> Runs | None:
    """Return the last lookup of ``variable`` if it was made where this is called: in eager mode, or in this graph.

    Whether a gradient is that lookup's, its ids have to tell.
    """
    runs = getattr(variable, _NOTE, None)
    setattr(variable, _NOTE, None)  # it would keep its graph in memory
    if runs is None or tf.executing_eagerly() != hasattr(runs.ids, "numpy"):
        return None
    same = tf.executing_eagerly() or runs.ids.graph is tf.compat.v1.get_default_graph()
    return runs if same and cluster.size() > 1 else None


def split_runs(values: tf.Tensor, runs: Runs) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return each rank's ids and values."""
    size = cluster.size()
    ids, parts = tf.split(runs.ids, runs.counts, num=size), tf.split(values, runs.counts, num=size)
    return list(zip(ids, parts, strict=True))
