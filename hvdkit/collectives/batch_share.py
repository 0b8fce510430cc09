"""The share of a global batch that this rank processes, while a step is traced or run.

Ranks may have different numbers of rows of a global batch. With n_r of its b rows on rank r, and N ranks with different
batches, the gradient of the mean over the global batch is a weighted average:

    g = sum_r (n_r / b) g_r = (1 / N) sum_r f_r g_r,   f_r = n_r N / b

Inside :func:`share_of_batch`, gradients are multiplied by f_r in both places in which they leave a rank: in the average
over ranks (replicated variables) and in lookups of sharded variables, whose gradients are sent to the rows' owners. A
training step gets correct gradients without handling the factor.

A ``tf.function`` that the step calls keeps its graph for later steps, whose shares may be others. So its graph does not
hold f_r, but reads it from a variable, to which each step assigns its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from hvdkit import cluster
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.collectives.graphs import function_graph
from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.errors import HvdkitError, describe

_SHARES: WeakRegistry[bool] = WeakRegistry()  # datasets


class _Current(threading.local):
    factor: tf.Tensor | None = None
    graph: tf.Graph | None = None  # of the function, or of eager mode, that entered the context
    active = False


_current = _Current()


@contextlib.contextmanager
def share_of_batch(factor: tf.Tensor | None) -> Iterator[None]:
    """Multiply the gradients of all steps traced or run in this context by ``factor``, on this thread.

    Args:
        factor: float64 scalar tensor f_r; 0 on a rank without rows, whose gradients count as zeros even if they are not
            finite. None if all ranks have the same number of rows.
    """
    if cluster.size() > 1:
        _factor_of_step().assign(1.0 if factor is None else factor)
    previous = _current.factor, _current.graph, _current.active
    _current.factor = factor
    _current.graph = function_graph()
    _current.active = True
    try:
        yield
    finally:
        _current.factor, _current.graph, _current.active = previous


def current_factor() -> tf.Tensor | None:
    """Return the factor of the current step, or None outside of :func:`share_of_batch` and for equal shares.

    In the graph of a function that the step calls, this is a tensor for equal shares, too.
    """
    if not _current.active or function_graph() is _current.graph:
        return _current.factor
    return _factor_of_step().read_value()


@functools.cache
def _factor_of_step() -> tf.Variable:
    """Return the variable with the factor of the current step."""
    return untracked_variable(1.0, tf.float64, "hvdkit_factor")


def within_share() -> bool:
    """Return True inside :func:`share_of_batch`: the step's rows are a share of a global batch."""
    return _current.active


def times_share(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return ``factor * x``; zeros if ``factor`` is 0, even if ``x`` is not finite."""
    return tf.math.multiply_no_nan(x, tf.cast(factor, x.dtype))


def refuse_outer_tape(argument: str, of: str) -> None:
    """Raise if a gradient that is divided by the factor is itself differentiated.

    It is unknown which loss is weighted then.

    Args:
        argument: the argument to name.
        of: what is differentiated.

    Raises:
        HvdkitError: an outer tape records.
    """
    if record.could_possibly_record():
        got = f"a second-order gradient of {of}, with batches that divide unevenly among ranks"
        remedy = (
            "use a batch size divisible by the number of ranks, drop the remainder, and remove tf.function from "
            "functions that the step calls"
        )
        raise HvdkitError(describe(argument, got, "batches that divide evenly", remedy))


def with_scaled_gradient(x: tf.Tensor) -> tf.Tensor:
    """Return ``x`` with a gradient that is multiplied by the current factor."""
    factor = current_factor()
    if factor is None or not x.dtype.is_floating:
        return x

    @tf.custom_gradient
    def identity(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda upstream: times_share(upstream, factor)

    return identity(x)


def mark_share(dataset: tf.data.Dataset) -> None:
    """Mark ``dataset`` as having different rows on each rank."""
    _SHARES.set(dataset, True)


def is_share(data: Any) -> bool:
    """Return True for a dataset marked by :func:`mark_share`, or derived from one."""
    inputs = data._inputs() if isinstance(data, tf.data.Dataset) else ()
    return data in _SHARES or any(map(is_share, inputs))
