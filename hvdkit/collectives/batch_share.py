"""The share of a global batch that this rank works on, while a step is traced or run.

The ranks' rows of a global batch may differ in number. With n_r rows of b on rank r, and N ranks with different
batches, the gradient of the mean over the global batch is a weighted average:

    g = sum_r (n_r / b) g_r = (1 / N) sum_r f_r g_r,   f_r = n_r N / b

Within :func:`share_of_batch` both places in which gradients leave a rank multiply them by f_r: the average over ranks
(replicated variables) and lookups of sharded variables, whose rows' gradients travel to their owners. A training step
that knows nothing of the factor is right.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvdkit.marks import WeakRegistry

_SHARES: WeakRegistry[bool] = WeakRegistry()  # datasets


class _Current(threading.local):
    factor: tf.Tensor | None = None
    active = False


_current = _Current()


@contextlib.contextmanager
def share_of_batch(factor: Any) -> Iterator[None]:
    """Multiply by ``factor`` the gradients of all steps traced or run within, on this thread.

    Args:
        factor: float32 scalar tensor f_r; 0 on a rank without rows, whose gradients count as zeros even if they are not
            finite. None if all ranks have equally many rows.
    """
    before = _current.factor, _current.active
    _current.factor, _current.active = factor, True
    try:
        yield
    finally:
        _current.factor, _current.active = before


def current_factor() -> tf.Tensor | None:
    """Return the factor of the step that is traced or run; None if there is none, or all shares are equal."""
    return _current.factor


def within_share() -> bool:
    """Return True within :func:`share_of_batch`: the step's rows are a share of a global batch."""
    return _current.active


def times_share(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return ``factor * x``, and zeros if ``factor`` is 0, whatever ``x`` is."""
    return tf.math.multiply_no_nan(x, tf.cast(factor, x.dtype))


def with_shared_gradient(x: tf.Tensor) -> tf.Tensor:
    """Return ``x``, whose gradient is multiplied by the current factor."""
    factor = _current.factor
    if factor is None or not x.dtype.is_floating:
        return x

    @tf.custom_gradient
    def identity(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda upstream: times_share(upstream, factor)

    return identity(x)


def mark_share(dataset: tf.data.Dataset) -> None:
    """Note that each rank has other rows in ``dataset``."""
    _SHARES.set(dataset, True)


def is_share(data: Any) -> bool:
    """Return True for a dataset that :func:`mark_share` has marked, and for one that is made of it."""
    parts = data._inputs() if isinstance(data, tf.data.Dataset) else ()
    return data in _SHARES or any(map(is_share, parts))
