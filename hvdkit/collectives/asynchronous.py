"""Eager collectives that run while the caller goes on: begun by ``..._async``, ended by :func:`wait`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.moving import allgather, alltoall
from hvdkit.collectives.reducing import allreduce, broadcast, grouped_allreduce, reducescatter
from hvdkit.collectives.values import graph_safe
from hvdkit.errors import describe


class Handle:
    """A collective under way; :func:`wait` returns its result."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        """Return True if the result, or an error, is here. It does not wait."""
        return self._future.done()

    def wait(self) -> Any:
        """Return the result, as :func:`wait` does."""
        return self._future.result()


@graph_safe
def wait(handle: Handle) -> Any:
    """Wait for an asynchronous collective, and return what the collective of the same name returns.

    Args:
        handle: of :func:`allreduce_async` or one of the others. It may be waited for several times.

    Raises:
        TypeError: ``handle`` is something else.
        Exception: what the collective raises.

    Example::

        handle = hk.allreduce_async(statistics)
        prepare_next_batch()
        statistics = hk.wait(handle)
    """
    if not isinstance(handle, Handle):
        raise TypeError(describe("handle", repr(handle), "what hk.allreduce_async returns", "pass that"))
    return handle.wait()


def allreduce_async(x: Any, *args: Any, **kwargs: Any) -> Handle:
    """Begin :func:`hvdkit.allreduce` of ``x``, and return at once.

    Ranks call asynchronous collectives in the same order, among each other and among all others; a collective that
    follows waits for those begun before. ``x`` may be changed afterwards. The result has no gradient in eager mode;
    inside a graph, where every collective is asynchronous, it has.

    Returns:
        A handle for :func:`hvdkit.wait`.

    Example::

        handles = [hk.allreduce_async(x) for x in statistics]
        averages = [hk.wait(handle) for handle in handles]
    """
    return _begin(allreduce, x, *args, **kwargs)


def grouped_allreduce_async(xs: Sequence[Any], *args: Any, **kwargs: Any) -> Handle:
    """Begin :func:`hvdkit.grouped_allreduce`; as :func:`allreduce_async`."""
    return _begin(grouped_allreduce, list(xs), *args, **kwargs)


def allgather_async(x: Any, **kwargs: Any) -> Handle:
    """Begin :func:`hvdkit.allgather`; as :func:`allreduce_async`."""
    return _begin(allgather, x, **kwargs)


def broadcast_async(x: Any, root: int = 0, **kwargs: Any) -> Handle:
    """Begin :func:`hvdkit.broadcast`; as :func:`allreduce_async`."""
    return _begin(broadcast, x, root, **kwargs)


def alltoall_async(x: Any, splits: Any = None, **kwargs: Any) -> Handle:
    """Begin :func:`hvdkit.alltoall`; as :func:`allreduce_async`."""
    return _begin(alltoall, x, splits, **kwargs)


def reducescatter_async(x: Any, *args: Any, **kwargs: Any) -> Handle:
    """Begin :func:`hvdkit.reducescatter`; as :func:`allreduce_async`."""
    return _begin(reducescatter, x, *args, **kwargs)


@graph_safe
def _begin(collective: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Handle:
    if not tf.executing_eagerly():
        built: Future[Any] = Future()
        built.set_result(collective(x, *args, **kwargs))
        return Handle(built)
    kept = [_snapshot(one) for one in x] if isinstance(x, list) else _snapshot(x)
    return Handle(cluster.call_order().submit(partial(collective, kept, *args, **kwargs)))


def _snapshot(x: Any) -> Any:
    """Return ``x`` as it is now."""
    if isinstance(x, np.ndarray):
        return x.copy()
    value = getattr(x, "value", x)
    if isinstance(value, tf.Variable):
        return value.read_value()
    return x
