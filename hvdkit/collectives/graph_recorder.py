"""Records the collectives of graphs: the last run of each, or every run with op determinism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from hvdkit.collectives.sites import MOST_SHAPES, add_site, describe_tensors, traced_line
from hvdkit.internals import is_op_determinism_enabled
from hvdkit.watchdog.flight_recorder import collective_key, recorder
from hvdkit.watchdog.reporter import reporter

Result = TypeVar("Result")


def run(
    native: Callable[[list[tf.Tensor]], Result],
    tensors: list[tf.Tensor],
    *,
    op_name: str,
    label: str,
    shown: Sequence[tf.Tensor],
    uneven: bool,
    ranks: Sequence[int] | None,
) -> Result:
    """Run ``native`` on ``tensors`` in a graph, record the collective, and return its result.

    Args:
        native: calls Horovod's op with the tensors.
        tensors: the tensors to exchange.
        op_name: the name that identifies the collective across ranks.
        label: the collective's name, for messages.
        shown: the tensors to describe in messages.
        uneven: ranks may differ in the first axis.
        ranks: the ranks that take part; None for all.
    """
    if not reporter().is_watched:  # no sentinel would read the records
        return native(tensors)
    # Sites read TensorFlow's clock, which it refuses if op determinism is enabled.
    if not is_op_determinism_enabled():
        return add_site(op_name, label, shown, ranks).record(native, tensors)
    line = traced_line()
    key = collective_key(op_name, ranks)
    numbers: list[int] = []

    def begin(*shapes: np.ndarray) -> None:
        first = [_shape(x.dtype, shape.tolist(), uneven) for x, shape in zip(shown, shapes, strict=False)]
        numbers.append(recorder().begin(key, describe_tensors(label, first, len(shown)), line, ranks, eager=False))

    def end() -> None:
        recorder().end(numbers.pop(0), eager=False)

    ready = _call_after(tensors, begin, [tf.shape(x) for x in shown[:MOST_SHAPES]])
    return _call_after(native(ready), end)


def _call_after(values: Result, function: Callable[..., None], arguments: Sequence[tf.Tensor] = ()) -> Result:
    """Return ``values``, one or several tensors, and have the graph call ``function`` once they are available."""

    def call(_: np.ndarray, *known: np.ndarray) -> np.ndarray:
        function(*known)
        return np.zeros((), np.int32)

    every = tf.nest.flatten(values)
    with tf.control_dependencies(every):
        # A stateful function would block every other collective of the graph until this one has finished. A stateless
        # one runs at every step only if its argument, here any element, is not constant and its result is used.
        element = tf.reshape(every[0], [-1])[:1]
        called = tf.numpy_function(call, [element, *arguments], tf.int32, stateful=False)
    called = tf.ensure_shape(called, [])
    passed_on: Result = tf.nest.map_structure(lambda x: depending_on(called >= 0, x), values)
    return passed_on


def depending_on(condition: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Return ``x`` in a form that depends on the scalar ``condition``."""
    # As a vector, because tf.where supports at most 8 axes.
    flat = tf.reshape(x, [-1])
    return tf.ensure_shape(tf.reshape(tf.where(condition, flat, flat), tf.shape(x)), x.shape)


def _shape(dtype: tf.DType, axes: list[int], uneven: bool) -> str:
    return f"{dtype.name}[{', '.join(map(str, ['*', *axes[1:]] if uneven and axes else axes))}]"
