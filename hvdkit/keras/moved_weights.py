"""Find weights that a training step moves by a gradient of one rank's rows, as steps with two gradients do (SAM).

Such a step takes a gradient, assigns ``weights + move`` with a move that depends on it, takes a second gradient there,
and assigns the old weights again. Optimizers average the second gradient only. The first is that of the rank's rows, so
ranks take the second one at different weights, and no comparison after the step notices it.

While the step is traced, each value that is assigned to a Keras variable is followed back through the graph. It counts
if it depends on the batch through the operations of a tape without a collective in between. Values that are read from
variables do not: averages of weights, target networks, constraints, weights that are restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.logs import warn_once
from hvdkit.errors import see
from hvdkit.keras.attribute_swap import swap_attributes
from hvdkit.sharding.shards import differs_by_rank
from hvdkit.sharding.variables import variable_name

_TAPE = "gradient_tape"  # the name scope in which tf.GradientTape computes
_COLLECTIVE = "Horovod"  # the beginning of the types of Horovod's ops
_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}  # they do not pass values on
_CALLS = {
    "PartitionedCall",
    "StatefulPartitionedCall",
    "If",
    "StatelessIf",
    "While",
    "StatelessWhile",
    "Case",
    "StatelessCase",
}


@contextlib.contextmanager
def warning_of_moved_weights(model: keras.Model, data: Any) -> Iterator[None]:
    """Warn on the chief, once, if the training step traced in this context moves weights by a gradient of its rows.

    Args:
        model: a Keras model.
        data: the batch of the step, with tensors of the graph that is being traced.
    """
    if not tf.inside_function() or not cluster.is_chief() or cluster.group(cluster.DATA).size == 1:
        yield
        return
    found: list[str] = []

    def watched(variable: keras.Variable) -> Callable[[Any], Any]:
        assign = variable.assign

        def watched_assign(value: Any) -> Any:
            if not found and tf.is_tensor(value) and depends_on_rows(value, data, is_gradient=False):
                found.append(variable_name(variable))
            return assign(value)

        return watched_assign

    with contextlib.ExitStack() as stack:
        for variable in model.trainable_variables:
            if not differs_by_rank(variable):
                stack.enter_context(swap_attributes(variable, assign=watched(variable)))
        yield
    if found:
        warn_once(
            f"train_step of {type(model).__name__}: moves {found[0]} by a gradient of this rank's rows, as SAM does; "
            "in one process it is that of the global batch: average it first, hk.average_gradients(tape.gradient(loss, "
            "variables)), unless the moves belong to single rows, as in meta-learning; "
            f"{see('pitfalls#two-gradients-in-a-step-as-in-sam')}"
        )


def depends_on_rows(value: Any, data: Any, *, is_gradient: bool) -> bool:
    """Return True if a value depends on a gradient of the rows of a batch, which no collective has combined.

    Args:
        value: a tensor of the graph of a step, or several.
        data: the batch of the step.
        is_gradient: True if ``value`` counts as a gradient, so that any dependence on the batch is found.
    """
    batch = [x for x in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(x)]
    graphs = {x.graph for x in batch}  # of the step, whose other arguments are not the batch
    batch_references = {x.ref() for x in batch}
    libraries: dict[int, dict[str, Any]] = {}
    seen: set[tuple[tf.Operation, bool]] = set()
    pending = [(tensor, is_gradient) for tensor in tf.nest.flatten(value, expand_composites=True)]
    while pending:
        tensor, is_gradient = pending.pop()
        if not tf.is_symbolic_tensor(tensor):  # a constant
            continue
        if is_gradient and tensor.ref() in batch_references:
            return True
        op = tensor.op
        if op.type == "IdentityN":  # of a custom gradient, as of hk.allreduce: results and arguments
            pending.append((op.inputs[tensor.value_index], is_gradient))
            continue
        if op.type == "Placeholder":
            outer = [outside for outside, inside in tensor.graph.captures if inside is tensor]
            is_argument = not outer and tensor.graph not in graphs  # of a function that the step calls
            if is_gradient and is_argument:
                return True
            pending.extend((each, is_gradient) for each in outer)
            continue
        if (op, is_gradient) in seen or op.type in _SHAPES or op.type.startswith(_COLLECTIVE):
            continue
        seen.add((op, is_gradient))
        nodes = _nodes_inside(op, libraries) if op.type in _CALLS else []
        if any(node.op.startswith(_COLLECTIVE) for node in nodes):
            continue
        is_gradient |= any(_TAPE in name.split("/") for name in (op.name, *(node.name for node in nodes)))
        pending.extend((x, is_gradient) for x in op.inputs if x.dtype not in (tf.resource, tf.variant))
    return False


def _nodes_inside(op: tf.Operation, libraries: dict[int, dict[str, Any]]) -> list[Any]:
    """Return the nodes of the functions that ``op`` calls. ``libraries`` caches those of each graph."""
    if id(op.graph) not in libraries:
        functions = op.graph.as_graph_def().library.function
        libraries[id(op.graph)] = {each.signature.name: each for each in functions}
    library = libraries[id(op.graph)]
    nodes: list[Any] = []
    names = _called(op.node_def)
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name in seen or name not in library:
            continue
        seen.add(name)
        for node in library[name].node_def:
            nodes.append(node)
            names += _called(node)
    return nodes


def _called(node: Any) -> list[str]:
    """Return the names of the functions in the attributes of a node."""
    functions = [f for attr in node.attr.values() for f in ([attr.func] if attr.HasField("func") else attr.list.func)]
    return [function.name for function in functions]
