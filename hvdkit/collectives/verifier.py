"""``HVDKIT_CHECK=1``: each rank reports when it waits in a collective of a graph. Off, graphs are what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.util import tf_stack

from hvdkit.cluster import checks, failure

_MOST_SHAPES = 4


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
    """Return what ``native`` makes of ``tensors`` in a graph, with a report before and one after it where asked for.

    Args:
        native: Horovod's op; is given the tensors and ``full``.
        tensors: what it exchanges.
        full: the name by which ranks match the collective.
        name: its name for people.
        shown: the tensors that people know.
        uneven: ranks may differ in the first axis.
        ranks: those that take part; None for all.
    """
    if failure.member() is None or not checks.enabled():
        return native(tensors, full)
    # TensorFlow's own stack: AutoGraph's code appears in it as it was written.
    line = checks.source_line((frame.filename, frame.lineno) for frame in tf_stack.extract_stack())
    key = f"{full} {list(ranks)}" if ranks else full
    more = f" and {len(shown) - _MOST_SHAPES} more" * (len(shown) > _MOST_SHAPES)
    told = {"key": key, "line": line, "ranks": ranks, "alike": True}

    def waits(*shapes: np.ndarray) -> dict[str, Any]:
        of = ", ".join(_shape(x.dtype, shape.tolist(), uneven) for x, shape in zip(shown, shapes, strict=False))
        return {"what": f"{name} of {of}{more}", **told}

    ready = _after_report("waits", waits, tensors, [tf.shape(x) for x in shown[:_MOST_SHAPES]])
    return _after_report("came", lambda: {"key": key}, native(ready, full))


def _after_report(
    kind: str, told: Callable[..., dict[str, Any]], values: Any, arguments: Sequence[tf.Tensor] = ()
) -> Any:
    """Return ``values``, one tensor or several, made by telling rank 0 what ``told`` says once they are there."""

    def tell(_: np.ndarray, *known: np.ndarray) -> np.ndarray:
        if (member := failure.member()) is not None:
            member.send(kind, **told(*known))
        return np.zeros((), np.int32)

    every = tf.nest.flatten(values)
    with tf.control_dependencies(every):
        # A function with state would hold back every other collective of the graph until this one is over. One without
        # is called at every step only if its argument, any element, is not known before and its result is used.
        element = tf.reshape(every[0], [-1])[:1]
        sent = tf.numpy_function(tell, [element, *arguments], tf.int32, stateful=False)
    sent = tf.ensure_shape(sent, [])
    return tf.nest.map_structure(lambda x: needing(sent >= 0, x), values)


def needing(condition: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Return ``x`` in a form that needs ``condition``, a scalar. As a vector: ``tf.where`` takes at most 8 axes."""
    flat = tf.reshape(x, [-1])
    return tf.ensure_shape(tf.reshape(tf.where(condition, flat, flat), tf.shape(x)), x.shape)


def _shape(dtype: tf.DType, axes: list[int], uneven: bool) -> str:
    return f"{dtype.name}[{', '.join(map(str, ['*', *axes[1:]] if uneven and axes else axes))}]"
