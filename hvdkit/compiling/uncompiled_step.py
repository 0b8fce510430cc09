"""``hk.compiled`` with HVDKIT_JIT_COMPILE=off: a ``tf.function``, which compares the variable across ranks.

With XLA, ranks exchange what they compile before the first step with an exchange. Without, they exchange at the same
place that they do not compile, so that a variable that differs between ranks is an error on all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.agreement import compare, gather
from hvdkit.compiling.operations import is_collective
from hvdkit.compiling.settings import VARIABLE, mode
from hvdkit.internals import ResourceVariable

_OF_VARIABLES = ("trainable", "name", "dtype", "constraint", "synchronization", "aggregation", "shape")


def uncompiled(step: Callable[..., object]) -> tf.types.experimental.PolymorphicFunction:
    """Return a step, a function or a ``tf.function``, as a ``tf.function``."""
    function = getattr(step, "python_function", step)  # of a tf.function
    name = getattr(function, "__name__", "step")
    has_compared: list[bool] = []

    @tf.autograph.experimental.do_not_convert
    def compare_once() -> None:
        graph = tf.compat.v1.get_default_graph()
        if has_compared or not has_exchange(graph) or cluster.size() == 1:
            return
        has_compared.append(True)
        with tf.init_scope():
            value: tuple[str, dict[int, str]] = (mode(), {})
            compare_modes([each for each, _ in gather(cluster.exchange(), kind_of_agreement(name), lambda: value)])

    def traced(*args: object, **kwargs: object) -> object:
        with tf.variable_creator_scope(create_now):  # as with XLA, since ranks compare variables while they trace
            result = step(*args, **kwargs)
        compare_once()
        return result

    traced.__name__ = name  # by which ranks match their exchanges
    vars(traced)["__signature__"] = inspect.signature(function)  # which inspect, and so tf.function, reads
    return tf.function(traced)


def create_now(create: Callable[..., tf.Variable], **options: object) -> tf.Variable:
    """Create a variable outside of the graph that is being traced, with its value.

    Otherwise TensorFlow would trace the step twice, or assign the value in a branch of its graph.
    """
    value = options.get("initial_value")
    if isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value):
        value = tf.get_static_value(value)  # of a constant, as of Nadam's counter
    if value is None:
        return create(**options)
    taken = {name: option for name, option in options.items() if name in _OF_VARIABLES}
    with tf.init_scope():
        return ResourceVariable(**(taken | {"initial_value": value() if callable(value) else value}))


def kind_of_agreement(name: str) -> str:
    """Return the name of the exchange before the first step of the function ``name``."""
    return f"programs of {name}"


def compare_modes(modes: Sequence[str]) -> None:
    """Raise CollectiveMismatchError if only some ranks have HVDKIT_JIT_COMPILE=off; the message names them."""
    compare(
        modes,
        VARIABLE,
        "set it to the same on every rank, or on none",
        key=lambda value: value == "off",
        show=lambda odd, usual: (odd or "no value", usual or "no value"),
    )


def has_exchange(graph: tf.Graph) -> bool:
    """Return True if a graph, or a function that it calls, exchanges something between ranks."""
    nodes = graph.as_graph_def()
    inner = (node for function in nodes.library.function for node in function.node_def)
    return any(is_collective(node.op) for node in (*nodes.node, *inner))
