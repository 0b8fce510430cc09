"""Rank and size as TensorFlow ops, evaluated when a graph runs: for graphs reused after a restart with other ranks."""

from __future__ import annotations

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.conversion import graph_safe


@graph_safe
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank when the op runs.

    Use it in graphs that are saved, or built once for several runs: the rank does not become a constant.

    Args:
        name: name of the op in the graph.

    Returns:
        An int32 scalar.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> seed = tf.function(lambda: 1000 + hk.rank_op())
        >>> int(seed()) == 1000 + hk.rank()
        True
    """
    return _horovod_op("rank_op", cluster.rank(), name)


@graph_safe
def size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks when the op runs; see ``hk.rank_op``.

    Args:
        name: name of the op in the graph.

    Returns:
        An int32 scalar.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> int(tf.function(hk.size_op)()) == hk.size()
        True
    """
    return _horovod_op("size_op", cluster.size(), name)


@graph_safe
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank on its host when the op runs; see ``hk.rank_op``.

    Args:
        name: name of the op in the graph.

    Returns:
        An int32 scalar.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> int(tf.function(hk.local_rank_op)()) == hk.local_rank()
        True
    """
    return _horovod_op("local_rank_op", cluster.local_rank(), name)


@graph_safe
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host when the op runs; see ``hk.rank_op``.

    Args:
        name: name of the op in the graph.

    Returns:
        An int32 scalar.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> int(tf.function(hk.local_size_op)()) == hk.local_size()
        True
    """
    return _horovod_op("local_size_op", cluster.local_size(), name)


def _horovod_op(op: str, value: int, name: str | None) -> tf.Tensor:
    native_op = getattr(cluster.horovod(), op, None)  # None if a world of one rank runs without Horovod
    return tf.constant(value, tf.int32, name=name) if native_op is None else native_op(name=name)
