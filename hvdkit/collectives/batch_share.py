"""The share of a global batch that this rank processes, while a step is traced or run.

Ranks may have different numbers of rows of a global batch. With n_r of its b rows on rank r, and N ranks with different
batches, the gradient of the mean over the global batch is a weighted average:

    g = sum_r (n_r / b) g_r = (1 / N) sum_r f_r g_r,   f_r = n_r N / b

Inside :func:`share_of_batch`, gradients are multiplied by f_r in both places in which they leave a rank: in the average
over ranks (replicated variables) and in lookups of sharded variables, whose gradients are sent to the rows' owners. A
training step gets correct gradients without handling the factor.

A ``tf.function`` that the step calls keeps its graph for later steps, whose shares may differ. Its graph therefore
reads f_r from a variable, which holds that of the current step, and 1 outside of steps.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.collectives.graphs import function_graph, is_inner, outermost_graph
from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.errors import HvdkitError, describe
from hvdkit.internals import record

_READ: WeakRegistry[bool] = WeakRegistry()  # factors that a graph reads from the variable
_SCRATCH_GRAPH = "scratch_graph"  # in which Keras calls the layers of a functional model, to get their shapes


class _Current(threading.local):
    factor: tf.Tensor | None = None
    sums: tf.Variable | None = None  # whether the gradients of the step are those of a sum
    graph: tf.Graph | None = None  # of the function, or of eager mode, that entered the context
    active = False
    gathered_rows: tuple[int, ...] = ()  # of the tensors that the step, run eagerly, has gathered


_current = _Current()


@contextlib.contextmanager
def share_of_batch(factor: tf.Tensor | None, sums: tf.Variable | None = None) -> Iterator[None]:
    """Multiply the gradients of all steps traced or run in this context by ``factor``, on this thread.

    Args:
        factor: float64 scalar tensor f_r; 0 on a rank without rows, whose gradients count as zeros even if they are not
            finite. None if all ranks have the same number of rows.
        sums: bool variable, True if the step's loss is a sum over its rows, whose gradients are summed over ranks. It
            is read in each graph that needs it, as functions that the step calls have their own.
    """
    outer = current_factor()
    previous = vars(_current).copy()
    _assign(factor)
    _current.factor = factor
    _current.sums = sums
    _current.graph = function_graph()
    _current.active = True
    _current.gathered_rows = ()
    try:
        yield
    finally:
        vars(_current).clear()
        vars(_current).update(previous)
        _assign(outer)


def current_factor() -> tf.Tensor | None:
    """Return the factor of the current step, or None outside of :func:`share_of_batch` and for equal shares.

    In the graph of a function that the step calls, this is a tensor for equal shares, too.
    """
    graph = function_graph()
    is_kept = graph is not _current.graph if _current.active else _is_in_scratch_graph(graph)  # for later steps
    if not is_kept or cluster.size() == 1:
        return _current.factor
    factor = _factor_of_step().read_value()
    _READ.set(factor, True)
    return factor


def gradient_factor() -> tf.Tensor | None:
    """Return the factor of the current step's gradients: :func:`current_factor`, or N with rows for a sum over rows."""
    factor = current_factor()
    if _current.sums is None:
        return factor
    share = tf.ones([], tf.float64) if factor is None else tf.cast(factor, tf.float64)
    number = tf.cast(cluster.group(cluster.DATA).size, tf.float64)
    result = tf.where(_current.sums.read_value(), number * tf.sign(share), share)
    if factor is None or factor in _READ:
        _READ.set(result, True)
    return result


def _is_in_scratch_graph(graph: tf.Graph) -> bool:
    """Return True for the graph of a function that a layer calls while Keras builds a functional model."""
    return is_inner(graph) and outermost_graph(graph).name.startswith(_SCRATCH_GRAPH)


def _assign(factor: tf.Tensor | None) -> None:
    if cluster.size() > 1:
        _factor_of_step().assign(1.0 if factor is None else factor)


@functools.cache
def _factor_of_step() -> tf.Variable:
    """Return the variable with the factor of the current step."""
    return untracked_variable(1.0, tf.float64, "hvdkit_factor")


def within_share() -> bool:
    """Return True inside :func:`share_of_batch`: the step's rows are a share of a global batch."""
    return _current.active


def record_gathered_rows(rows: tf.Tensor) -> None:
    """Record the number of rows that the current step has gathered from all ranks, if it runs eagerly."""
    if tf.executing_eagerly():
        _current.gathered_rows += (int(rows),)


def gathered_rows() -> tuple[int, ...]:
    """Return the numbers of rows that the current step has gathered, if it runs eagerly."""
    return _current.gathered_rows


def row_ratio() -> tf.Tensor:
    """Return b / n_r, the rows of the global batch for each of this rank's: a float64 scalar, 0 on a rank without rows.

    A gradient that is multiplied by it is summed over ranks, where others are averaged by rows.
    """
    factor = current_factor()
    factor = tf.ones([], tf.float64) if factor is None else tf.cast(factor, tf.float64)
    return tf.math.divide_no_nan(tf.cast(cluster.group(cluster.DATA).size, tf.float64), factor)


def times_share(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return ``factor * x``; zeros if ``factor`` is 0, even if ``x`` is not finite."""
    return tf.math.multiply_no_nan(x, tf.cast(factor, x.dtype))


def without_outer_tape(factor: tf.Tensor, argument: str, of: str) -> tf.Tensor:
    """Return ``factor`` for the gradient of a collective, which may itself be differentiated only with a factor of 1.

    Otherwise it is unknown which loss is weighted. Messages name ``argument`` and what is differentiated.

    Raises:
        HvdkitError: an outer tape records. A graph that is kept raises InvalidArgumentError when it runs.
    """
    if not record.could_possibly_record():
        return factor
    got = f"a second-order gradient of {of}, with batches that divide unevenly among ranks"
    remedy = "use a batch size divisible by the number of ranks, and drop the remainder"
    message = describe(argument, got, "batches that divide evenly", remedy)
    if factor not in _READ:
        raise HvdkitError(message)
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(factor, 1), [message])]):
        return tf.identity(factor)


def with_scaled_gradient(x: tf.Tensor) -> tf.Tensor:
    """Return ``x`` with a gradient that is multiplied by the current factor."""
    factor = gradient_factor()
    if factor is None or not x.dtype.is_floating:
        return x

    @tf.custom_gradient
    def identity(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(x), lambda upstream: times_share(upstream, factor)

    return identity(x)
