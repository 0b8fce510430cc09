"""Records the collectives of graphs: the last run of each, or every run with ``HVDKIT_CHECK=1``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.collectives.sites import MOST_SHAPES, describe_tensors, sites, source_line
from hvdkit.watchdog.flight_recorder import collective_key, recorder
from hvdkit.watchdog.reporter import reporter
from hvdkit.watchdog.settings import CHECK


def run(
    native: Callable[[list[tf.Tensor], str], Any],
    tensors: list[tf.Tensor],
    full: str,
    *,
    name: str,
    shown: Sequence[tf.Tensor],
    uneven: bool,
    ranks: Sequence[int] | None,
) -> Any:
    """Run ``native`` on ``tensors`` in a graph, record the collective, and return its result.

    Args:
        native: calls Horovod's op with the tensors and ``full``.
        tensors: the tensors to exchange.
        full: the name that identifies the collective across ranks.
        name: the collective's name, for messages.
        shown: the user's tensors, for messages.
        uneven: ranks may differ in the first axis.
        ranks: the ranks that take part; None for all.
    """
    if not reporter().is_watched:  # no sentinel would read the records
        return native(tensors, full)
    if os.environ.get(CHECK) != "1":
        return sites().at(name, full, shown, ranks).wrap(lambda ready: native(ready, full), tensors)
    line = source_line()
    key = collective_key(full, ranks)
    begun: list[int] = []

    def begin(*shapes: np.ndarray) -> None:
        first = [_shape(x.dtype, shape.tolist(), uneven) for x, shape in zip(shown, shapes, strict=False)]
        begun.append(recorder().begin(key, describe_tensors(name, first, len(shown)), line, ranks, eager=False))

    def end() -> None:
        recorder().end(begun.pop(0), eager=False)

    ready = _after(begin, tensors, [tf.shape(x) for x in shown[:MOST_SHAPES]])
    return _after(end, native(ready, full))


def _after(note: Callable[..., None], values: Any, arguments: Sequence[tf.Tensor] = ()) -> Any:
    """Return ``values``, one or several tensors, and have the graph call ``note`` once they are available."""

    def call(_: np.ndarray, *known: np.ndarray) -> np.ndarray:
        note(*known)
        return np.zeros((), np.int32)

    every = tf.nest.flatten(values)
    with tf.control_dependencies(every):
        # A stateful function would block every other collective of the graph until this one has finished. A stateless
        # one runs at every step only if its argument, here any element, is not constant and its result is used.
        element = tf.reshape(every[0], [-1])[:1]
        called = tf.numpy_function(call, [element, *arguments], tf.int32, stateful=False)
    called = tf.ensure_shape(called, [])
    return tf.nest.map_structure(lambda x: needing(called >= 0, x), values)


def needing(condition: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Return ``x`` in a form that depends on the scalar ``condition``."""
    # As a vector, because tf.where supports at most 8 axes.
    flat = tf.reshape(x, [-1])
    return tf.ensure_shape(tf.reshape(tf.where(condition, flat, flat), tf.shape(x)), x.shape)


def _shape(dtype: tf.DType, axes: list[int], uneven: bool) -> str:
    return f"{dtype.name}[{', '.join(map(str, ['*', *axes[1:]] if uneven and axes else axes))}]"
