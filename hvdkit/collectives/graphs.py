"""Collectives inside graphs: the names by which ranks match them, their order, and graphs that cannot hold them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops import control_flow_v2_func_graphs as parts

from hvdkit.collectives import verifier
from hvdkit.errors import HvdkitError, describe

_PARTS_OF_FUNCTIONS = (parts.CondBranchFuncGraph, parts.WhileCondFuncGraph, parts.WhileBodyFuncGraph)


def run_collective(
    name: str,
    tensors: Sequence[tf.Tensor],
    native: Callable[[list[tf.Tensor], str], Any],
    *,
    label: str | None = None,
    shown: Sequence[tf.Tensor] | None = None,
    uneven: bool = False,
    ranks: Sequence[int] | None = None,
) -> Any:
    """Return what Horovod's op ``native`` makes of ``tensors``, in eager mode or as a part of a graph that runs it.

    Args:
        name: by which ranks match the collective, before it is made unique in its graph.
        tensors: what it exchanges.
        native: is given the tensors, ready for it, and the name by which ranks match.
        label: the name for messages; default: ``name``.
        shown: what the user gave, if ``tensors`` is a conversion of it.
        uneven: ranks may differ in the first axis.
        ranks: those that take part; None for all.

    Raises:
        HvdkitError: inside ``jit_compile=True``.
    """
    if not tf.inside_function():
        return native(list(tensors), name)
    ready = [_not_constant(x) for x in tensors]
    known = tensors if shown is None else shown
    known_as = label or name
    result = verifier.run(native, ready, _op_name(name, ranks), name=known_as, shown=known, uneven=uneven, ranks=ranks)
    _run_in_step(tf.nest.flatten(result)[0])
    return result


def _op_name(name: str, ranks: Sequence[int] | None) -> str:
    """Return the name by which Horovod matches this collective between ranks.

    A node's own name would carry the name scopes around it, and Keras numbers those by how many layers and
    optimizers a process has made so far: a chief that made one more would wait for its peers for ever. So scopes are
    ignored, and the collectives of one function are numbered in the order in which they are traced, those in its
    branches and loops included. A function that it calls numbers its own: it may have been traced before.
    """
    refuse_xla()
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, _PARTS_OF_FUNCTIONS):
        graph = graph.outer_graph
    traced = graph.get_collection_ref("hvdkit_collectives")
    traced.append(name)
    # The function's name comes second: "_step" and "<lambda>" may not begin the name of a node.
    full = f"{name}.{re.sub('[^A-Za-z0-9_.]', '_', graph.name)}.{traced.count(name)}"
    if not ranks or len(ranks) < 2:
        return full
    # Several groups of a mesh are in theirs at once: a profile tells them apart by the name.
    return f"{full}.ranks_{ranks[0]}_to_{ranks[-1]}_by_{ranks[1] - ranks[0]}"


def refuse_xla() -> None:
    """Raise HvdkitError while a graph for XLA is traced."""
    if tf.inside_function() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise HvdkitError(
            describe(
                "jit_compile",
                "a step compiled by XLA",
                "jit_compile=False: Horovod has no XLA kernels",
                "pass jit_compile=False to model.compile or tf.function (Keras's default 'auto' is True on GPUs)",
            )
        )


def _not_constant(x: tf.Tensor) -> tf.Tensor:
    """Return ``x`` in a form that TensorFlow cannot take for a constant.

    It would run a collective of constants while it prepares the graph: on the rank that traces a function anew, for
    a last batch that is smaller and so weighs less, but not on the others, which would never answer.
    """
    if not _may_be_constant(x):
        return x
    return verifier.needing(tf.timestamp() >= 0, x)


def _may_be_constant(x: tf.Tensor) -> bool:
    """Return False where ``x`` depends on a variable, another op with state, or an argument of the outermost function.

    Arguments of functions inside that one are not followed: they may be constants after inlining.
    """
    seen, ahead = set(), [x]
    while ahead:
        tensor = ahead.pop()
        if isinstance(tensor, EagerTensor) or tensor.op.op_def.is_stateful:
            return False
        if tensor.op in seen:
            continue
        seen.add(tensor.op)
        ahead.extend(tensor.op.inputs)
        if tensor.op.type == "Placeholder":
            if not _is_inside(tensor.graph):
                return False
            ahead.extend(outer for outer, inner in tensor.graph.captures if inner is tensor)
    return True


def _is_inside(graph: tf.Graph) -> bool:
    """Return True for the graph of a function, branch or loop body that is traced within another function."""
    return getattr(getattr(graph, "outer_graph", None), "building_function", False)


def _run_in_step(result: tf.Tensor) -> None:
    """Have TensorFlow run the collective that made ``result`` at every step, and one call at a time.

    Horovod does not tell TensorFlow that its ops have effects. So TensorFlow would leave out those whose result a
    rank happens not to use, and run a node a second time, in a loop's next turn or in a function called twice, while
    the first is under way, which Horovod refuses. An assertion about the result counts as an effect. It holds back
    other functions' calls and turns only, not the collectives beside this one.
    """
    # A condition known beforehand would be left out, with everything that only it needs.
    tf.raw_ops.Assert(condition=tf.timestamp() >= 0, data=[tf.reshape(result, [-1])[:1]])
