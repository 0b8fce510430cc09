"""Collectives inside graphs: matching names, execution order, and the rejection of XLA."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from types import CodeType, FrameType

import tensorflow as tf

from hvdkit.cluster.progress import is_user_file
from hvdkit.collectives.conversion import untracked_variable
from hvdkit.collectives.graph_recorder import depending_on
from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.errors import HvdkitError, describe, see
from hvdkit.internals import control_flow_util
from hvdkit.internals import control_flow_v2_func_graphs as func_graphs
from hvdkit.watchdog.flight_recorder import recorder

_BRANCHES_AND_LOOPS = (
    func_graphs.CondBranchFuncGraph,
    func_graphs.WhileCondFuncGraph,
    func_graphs.WhileBodyFuncGraph,
)
_DERIVED = re.compile(r"__(?:forward|backward|inference)_")  # TensorFlow's prefixes of functions derived from another
_COLLECTIVES: WeakRegistry[list[str]] = WeakRegistry()  # of each graph, in tracing order
_CALLS: dict[str, tf.Variable] = {}  # of inner functions, by name
_DIVIDED: WeakRegistry[bool] = WeakRegistry()  # graphs whose exchanges stay outside the programs for XLA


def op_name(name: str, ranks: Sequence[int] | None) -> str:
    """Return the name by which Horovod matches this collective between ranks.

    A node's own name contains its name scopes, which Keras numbers by how many layers and optimizers the process has
    created: if the chief had created one more, it would wait for its peers forever. So name scopes are ignored, and the
    collectives of a function, including those in its branches and loops, are numbered in tracing order. A function that
    it calls has its own numbers, because it may have been traced earlier, in another place on each rank. The backward
    pass of a function has the function's name without the number that TensorFlow appends, which counts everything that
    this process has created.

    Raises:
        HvdkitError: inside ``jit_compile=True``.
    """
    refuse_xla()
    graph = function_graph()
    # Not a collection of the graph, which a graph inherits from the one in which it is traced.
    traced = _COLLECTIVES.get(graph)
    if traced is None:
        traced = []
        _COLLECTIVES.set(graph, traced)
    traced.append(name)
    recorder().graphs.add(outermost_graph(graph).name)
    _note_callers(recorder().callers)
    # The function's name comes second: a node's name must not start with "_step" or "<lambda>".
    full = f"{name}.{re.sub('[^A-Za-z0-9_.]', '_', _function_name(graph.name))}.{traced.count(name)}"
    if not ranks or len(ranks) < 2:
        return full
    # Groups of a mesh run theirs concurrently. The ranks in the name distinguish them in a profile.
    return f"{full}.ranks_{ranks[0]}_to_{ranks[-1]}_by_{ranks[1] - ranks[0]}"


def function_graph() -> tf.Graph:
    """Return the graph of the function that is being traced, also inside its branches and loops."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, _BRANCHES_AND_LOOPS):
        graph = graph.outer_graph
    return graph


def outermost_graph(graph: tf.Graph) -> tf.Graph:
    """Return the graph in which the trace of ``graph`` began."""
    while is_inner(graph):
        graph = graph.outer_graph
    return graph


def _function_name(graph_name: str) -> str:
    """Return the name of a function's graph without the numbers that TensorFlow appends, one per prefix.

    Example:
        >>> _function_name("__backward___backward_step_2_173_297")  # the second derivative of step_2
        '__backward___backward_step_2'
    """
    derived = len(_DERIVED.findall(graph_name))
    return re.sub(rf"(_\d+){{{derived}}}$", "", graph_name)


def _note_callers(callers: dict[CodeType, set[int]]) -> None:
    """Add the user's code on the call stack, with the lines of the calls, to ``callers``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            callers.setdefault(frame.f_code, set()).add(frame.f_lineno)
        frame = frame.f_back


def divide_for_xla() -> None:
    """Note that XLA compiles only the parts around the exchanges of the graph that is being traced."""
    _DIVIDED.set(tf.compat.v1.get_default_graph(), True)


def is_for_xla() -> bool:
    """Return True if the graph that is being traced is for XLA as a whole, which can run none of our operations."""
    if not tf.inside_function():
        return False
    graph = tf.compat.v1.get_default_graph()
    outer = graph
    while outer in _DIVIDED or is_inner(outer):
        if outer in _DIVIDED:  # what is outside of a divided graph decides
            graph = outer.outer_graph
        outer = outer.outer_graph
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def refuse_xla() -> None:
    """Raise HvdkitError if a graph for XLA is being traced."""
    if is_for_xla():
        raise error_of_xla()


def error_of_xla() -> HvdkitError:
    """Return the error about an exchange inside of what XLA compiles."""
    return HvdkitError(
        describe(
            "jit_compile",
            "a step compiled by XLA",
            "jit_compile=False: Horovod has no XLA kernels",
            "train with hk.fit, pass a callback of hvdkit to fit, or wrap the step with hk.compiled, which compile "
            "what is around exchanges; or pass jit_compile=False to model.compile or tf.function (Keras's default "
            "'auto' is True on GPUs); " + see("gradients#xla"),
        )
    )


def not_constant(x: tf.Tensor) -> tf.Tensor:
    """Return ``x`` in a form that TensorFlow does not fold as a constant.

    Constant folding would run the collective while the graph is prepared. If only one rank traces the function again,
    e.g. for a smaller last batch, the other ranks would never answer.
    """
    if not _may_be_constant(x):
        return x
    return depending_on(true_at_run_time(), x)


TRUE_AT_RUN_TIME = "hvdkit_true_at_run_time"


def true_at_run_time() -> tf.Tensor:
    """Return True, as a value that TensorFlow does not know while it optimizes the graph.

    It comes from a seeded random op: TensorFlow refuses ``tf.timestamp`` and unseeded random ops if op determinism is
    enabled. The op has its own seed and state, so it changes no other random numbers.
    """
    with tf.device("/CPU:0"):
        no_values = tf.zeros([0], tf.int32)
        return tf.raw_ops.RandomUniform(shape=no_values, dtype=tf.float32, seed=1, seed2=1, name=TRUE_AT_RUN_TIME) >= 0


def _may_be_constant(x: tf.Tensor) -> bool:
    """Return False if ``x`` depends on a variable, another stateful op, or an argument of the outermost function.

    Arguments of inner functions do not count: they may be constants after inlining.
    """
    seen = set()
    pending = [x]
    while pending:
        tensor = pending.pop()
        if not tf.is_symbolic_tensor(tensor) or tensor.op.op_def.is_stateful:
            return False
        if tensor.op in seen:
            continue
        seen.add(tensor.op)
        pending.extend(tensor.op.inputs)
        if tensor.op.type == "Placeholder":
            if not is_inner(tensor.graph):
                return False
            pending.extend(outer for outer, inner in tensor.graph.captures if inner is tensor)
    return True


def is_inner(graph: tf.Graph) -> bool:
    """Return True for the graph of a function, branch or loop body that is traced inside another function."""
    return getattr(getattr(graph, "outer_graph", None), "building_function", False)


def run_in_step(result: tf.Tensor) -> None:
    """Make TensorFlow run the collective that produced ``result`` at every step, one call at a time.

    Horovod does not declare its ops as stateful. So TensorFlow would prune collectives whose result a rank does not
    use. It would also run a node again, in the next iteration of a loop or in a function called twice, while its first
    run is still in progress, which Horovod rejects. An assertion about the result counts as a side effect. It
    serializes only iterations and steps, not the other collectives of the same graph. TensorFlow runs two calls of an
    inner function at once if the function uses variables and writes to none, so there the collective also counts its
    calls in a variable.
    """
    # A constant condition would be pruned, together with everything that only it needs.
    assertion = tf.raw_ops.Assert(condition=true_at_run_time(), data=[tf.reshape(result, [-1])[:1]])
    effects = [assertion]
    function = function_graph()
    if is_inner(function):
        with tf.control_dependencies([assertion]):
            effects.append(_calls_of(_function_name(function.name)).assign_add(1, read_value=False))
    graph = tf.compat.v1.get_default_graph()
    # TensorFlow doesn't order the side effects of most backward passes: the next call would not wait for this one.
    if _DERIVED.match(graph.name or "") and not graph._add_control_dependencies:
        graph.control_outputs.extend(effects)


def _calls_of(name: str) -> tf.Variable:
    """Return the number of collectives that the inner functions called ``name`` have run on this rank."""
    if name not in _CALLS:
        _CALLS[name] = untracked_variable(0, tf.int64, "hvdkit_calls")
    return _CALLS[name]
