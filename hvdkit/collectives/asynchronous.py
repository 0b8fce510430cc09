"""Eager collectives that run in the background: started by ``..._async``, completed by :func:`wait`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.conversion import TensorLike, graph_safe
from hvdkit.collectives.gathers import allgather, alltoall
from hvdkit.collectives.reductions import allreduce, broadcast, grouped_allreduce, reducescatter
from hvdkit.errors import describe


class Handle:
    """A collective in progress, started by ``hk.allreduce_async`` or another ``..._async`` function.

    Args:
        future: the pending result. Users get handles from these functions only.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> handle = hk.allreduce_async(1.0)
        >>> handle.wait()  # same as hk.wait(handle)
        1.0
        >>> handle.done()
        True
        >>> isinstance(handle, hk.Handle)
        True
    """

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        """Return True if the collective has finished, with a result or an error. Does not block."""
        return self._future.done()

    def wait(self) -> Any:
        """Return the result, as ``hk.wait`` does.

        Raises:
            Exception: any exception of the collective.
        """
        return self._future.result()


@graph_safe
def wait(handle: Handle) -> Any:
    """Wait for an asynchronous collective, and return its result.

    Args:
        handle: the result of ``hk.allreduce_async`` or another ``..._async`` function. May be passed several times.

    Returns:
        What the synchronous collective returns.

    Raises:
        TypeError: ``handle`` is not a handle.
        Exception: any exception of the collective.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> handle = hk.allreduce_async(np.float32([1, 2]))
        >>> batch = np.random.rand(256, 28, 28)  # prepare the next batch in the meantime
        >>> hk.wait(handle)
        array([1., 2.], dtype=float32)
    """
    if not isinstance(handle, Handle):
        raise TypeError(describe("handle", repr(handle), "what hk.allreduce_async returns", "pass that"))
    return handle.wait()


def allreduce_async(x: TensorLike, *args: object, **kwargs: object) -> Handle:
    """Start ``hk.allreduce`` of ``x``, and return immediately.

    All ranks must call asynchronous and other collectives in the same order; a collective waits for those started
    before it. ``x`` may be modified afterwards. In eager mode, the result has no gradient. Inside a graph, all
    collectives are asynchronous, and the result has a gradient.

    Args:
        x: as for ``hk.allreduce``.
        *args: ``op``, as for ``hk.allreduce``.
        **kwargs: the other arguments of ``hk.allreduce``.

    Returns:
        A handle for ``hk.wait``, which also raises the errors of the collective.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> handles = [hk.allreduce_async(x, hk.Max) for x in (1.0, 2.0)]
        >>> [hk.wait(handle) for handle in handles]
        [1.0, 2.0]
    """
    return _start(allreduce, x, *args, **kwargs)


def grouped_allreduce_async(xs: Sequence[TensorLike], *args: object, **kwargs: object) -> Handle:
    """Start ``hk.grouped_allreduce``, and return immediately; see ``hk.allreduce_async``.

    Args:
        xs: as for ``hk.grouped_allreduce``.
        *args: ``op``, as for ``hk.grouped_allreduce``.
        **kwargs: the other arguments of ``hk.grouped_allreduce``.

    Returns:
        A handle for ``hk.wait``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> handle = hk.grouped_allreduce_async([0.25, 0.5])
        >>> hk.wait(handle)
        [0.25, 0.5]
    """
    return _start(grouped_allreduce, list(xs), *args, **kwargs)


def allgather_async(x: TensorLike, **kwargs: object) -> Handle:
    """Start ``hk.allgather``, and return immediately; see ``hk.allreduce_async``.

    Args:
        x: as for ``hk.allgather``.
        **kwargs: the other arguments of ``hk.allgather``.

    Returns:
        A handle for ``hk.wait``.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> handle = hk.allgather_async(np.zeros((2, 8)))  # 2 rows per rank
        >>> hk.wait(handle).shape == (2 * hk.size(), 8)
        True
    """
    return _start(allgather, x, **kwargs)


def broadcast_async(x: TensorLike, root: int = 0, **kwargs: object) -> Handle:
    """Start ``hk.broadcast``, and return immediately; see ``hk.allreduce_async``.

    Args:
        x: as for ``hk.broadcast``.
        root: as for ``hk.broadcast``.
        **kwargs: the other arguments of ``hk.broadcast``.

    Returns:
        A handle for ``hk.wait``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> handle = hk.broadcast_async(hk.rank(), root=0)
        >>> hk.wait(handle)
        0
    """
    return _start(broadcast, x, root, **kwargs)


def alltoall_async(x: TensorLike, splits: npt.ArrayLike | tf.Tensor | None = None, **kwargs: object) -> Handle:
    """Start ``hk.alltoall``, and return immediately; see ``hk.allreduce_async``.

    Args:
        x: as for ``hk.alltoall``.
        splits: as for ``hk.alltoall``.
        **kwargs: the other arguments of ``hk.alltoall``.

    Returns:
        A handle for ``hk.wait``.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> handle = hk.alltoall_async(np.arange(hk.size()))  # one row to each rank
        >>> hk.wait(handle).tolist() == [hk.rank()] * hk.size()
        True
    """
    return _start(alltoall, x, splits, **kwargs)


def reducescatter_async(x: TensorLike, *args: object, **kwargs: object) -> Handle:
    """Start ``hk.reducescatter``, and return immediately; see ``hk.allreduce_async``.

    Args:
        x: as for ``hk.reducescatter``.
        *args: ``op``, as for ``hk.reducescatter``.
        **kwargs: the other arguments of ``hk.reducescatter``.

    Returns:
        A handle for ``hk.wait``.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> handle = hk.reducescatter_async(np.ones(3 * hk.size()), hk.Average)
        >>> hk.wait(handle)
        array([1., 1., 1.])
    """
    return _start(reducescatter, x, *args, **kwargs)


@graph_safe
def _start(
    collective: Callable[..., object], x: TensorLike | list[TensorLike], *args: object, **kwargs: object
) -> Handle:
    if not tf.executing_eagerly():
        finished: Future[object] = Future()
        finished.set_result(collective(x, *args, **kwargs))
        return Handle(finished)
    snapshot = [_snapshot(each) for each in x] if isinstance(x, list) else _snapshot(x)
    return Handle(cluster.call_order().submit(partial(collective, snapshot, *args, **kwargs)))


def _snapshot(x: TensorLike) -> TensorLike:
    """Return a copy of ``x`` that later changes do not affect."""
    if isinstance(x, np.ndarray):
        return x.copy()
    value = getattr(x, "value", x)
    if isinstance(value, tf.Variable):
        return value.read_value()
    return x
