"""Eager collectives that run in the background: started by ``..._async``, completed by :func:`wait`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.conversion import graph_safe
from hvdkit.collectives.gathers import allgather, alltoall
from hvdkit.collectives.reductions import allreduce, broadcast, grouped_allreduce, reducescatter
from hvdkit.errors import describe


class Handle:
    """A collective in progress; :func:`wait` returns its result."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        """Return True if the collective has finished, with a result or an error. Does not block."""
        return self._future.done()

    def wait(self) -> Any:
        """Return the result, as :func:`wait` does."""
        return self._future.result()


@graph_safe
def wait(handle: Handle) -> Any:
    """Wait for an asynchronous collective, and return its result.

    Args:
        handle: the result of :func:`allreduce_async` or another ``..._async`` function. May be passed several times.

    Raises:
        TypeError: ``handle`` is not a handle.
        Exception: any exception of the collective.

    Example::

        handle = hk.allreduce_async(statistics)
        prepare_next_batch()
        statistics = hk.wait(handle)
    """
    if not isinstance(handle, Handle):
        raise TypeError(describe("handle", repr(handle), "what hk.allreduce_async returns", "pass that"))
    return handle.wait()


def allreduce_async(x: Any, *args: Any, **kwargs: Any) -> Handle:
    """Start :func:`hvdkit.allreduce` of ``x``, and return immediately.

    All ranks must call asynchronous and other collectives in the same order; a collective waits for those started
    before it. ``x`` may be modified afterwards. In eager mode, the result has no gradient. Inside a graph, all
    collectives are asynchronous, and the result has a gradient.

    Returns:
        A handle for :func:`hvdkit.wait`.

    Example::

        handles = [hk.allreduce_async(x) for x in statistics]
        averages = [hk.wait(handle) for handle in handles]
    """
    return _start(allreduce, x, *args, **kwargs)


def grouped_allreduce_async(xs: Sequence[Any], *args: Any, **kwargs: Any) -> Handle:
    """Start :func:`hvdkit.grouped_allreduce`; see :func:`allreduce_async`."""
    return _start(grouped_allreduce, list(xs), *args, **kwargs)


def allgather_async(x: Any, **kwargs: Any) -> Handle:
    """Start :func:`hvdkit.allgather`; see :func:`allreduce_async`."""
    return _start(allgather, x, **kwargs)


def broadcast_async(x: Any, root: int = 0, **kwargs: Any) -> Handle:
    """Start :func:`hvdkit.broadcast`; see :func:`allreduce_async`."""
    return _start(broadcast, x, root, **kwargs)


def alltoall_async(x: Any, splits: Any = None, **kwargs: Any) -> Handle:
    """Start :func:`hvdkit.alltoall`; see :func:`allreduce_async`."""
    return _start(alltoall, x, splits, **kwargs)


def reducescatter_async(x: Any, *args: Any, **kwargs: Any) -> Handle:
    """Start :func:`hvdkit.reducescatter`; see :func:`allreduce_async`."""
    return _start(reducescatter, x, *args, **kwargs)


@graph_safe
def _start(collective: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Handle:
    if not tf.executing_eagerly():
        finished: Future[Any] = Future()
        finished.set_result(collective(x, *args, **kwargs))
        return Handle(finished)
    snapshot = [_snapshot(each) for each in x] if isinstance(x, list) else _snapshot(x)
    return Handle(cluster.call_order().submit(partial(collective, snapshot, *args, **kwargs)))


def _snapshot(x: Any) -> Any:
    """Return a copy of ``x`` that later changes do not affect."""
    if isinstance(x, np.ndarray):
        return x.copy()
    value = getattr(x, "value", x)
    if isinstance(value, tf.Variable):
        return value.read_value()
    return x
