"""Copy the operations of a graph into another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from hvdkit.compiling.operations import LOOPS_AND_BRANCHES, functions_of
from hvdkit.internals import handle_data_util

if TYPE_CHECKING:
    import numpy as np

_MOST_CONSTANTS = 1024
_MOST_DERIVED = 64
_OF_SHAPES = ("VariableShape", "Shape", "ShapeN", "Size")
_HANDLES = (tf.resource, tf.variant)
_UPDATE = "XlaDynamicUpdateSlice"  # of the gradient of tf.slice, which TensorFlow has no kernel for


class Copies:
    """The copies of a graph's tensors and operations in the graph that is being traced.

    Args:
        graph: the graph of a function.
        compiled: whether the copies are for XLA.
        tensors: tensors of ``graph``, and their copies.
    """

    def __init__(self, graph: tf.Graph, tensors: Iterable[tuple[tf.Tensor, tf.Tensor]], *, compiled: bool) -> None:
        self._graph = graph
        self._compiled = compiled
        self._captured = {id(inner): outer for outer, inner in graph.captures}
        self._tensors = {id(original): copy for original, copy in tensors}
        self._operations: dict[tf.Operation, tf.Operation] = {}

    def __getitem__(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the copy of a tensor."""
        copy = self._tensors.get(id(tensor))
        if copy is None:
            copy = self._tensors[id(tensor)] = self._source(tensor)
        return copy

    def add(self, originals: Sequence[tf.Tensor], copies: Sequence[tf.Tensor]) -> None:
        """Add copies of tensors."""
        self._tensors |= {id(original): copy for original, copy in zip(originals, copies, strict=True)}

    def stand_for(self, operations: Iterable[tf.Operation], call: tf.Operation) -> None:
        """Have ``call`` stand for operations that it contains, in the control inputs of others."""
        self._operations |= dict.fromkeys(operations, call)

    def controls(self, operations: Iterable[tf.Operation]) -> list[tf.Operation]:
        """Return the copies of the control inputs of ``operations``."""
        inputs = (each for op in operations for each in op.control_inputs)
        return list(dict.fromkeys(self._operations[op] for op in inputs if op in self._operations))

    def _source(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a captured tensor in the new graph, or the copy of a constant."""
        captured = self._captured.get(id(tensor))
        if captured is None:  # a constant, or a value that is derived from constants
            return self._copied(tensor.op)[tensor.value_index]
        is_small = captured.dtype not in _HANDLES and hasattr(captured, "numpy")
        if is_small and captured.shape.num_elements() <= _MOST_CONSTANTS:
            return tf.constant(captured.numpy())
        return tf.compat.v1.get_default_graph().capture(captured)

    def copy(self, op: tf.Operation) -> None:
        """Copy an operation whose inputs are copied."""
        self.add(op.outputs, self._copied(op))

    def _copied(self, op: tf.Operation) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        if self._compiled and op.type in _OF_SHAPES:
            values = [static_value(output) for output in op.outputs]
            if all(value is not None for value in values):
                return [tf.constant(value, output.dtype) for value, output in zip(values, op.outputs, strict=True)]
        inputs = [self[tensor] for tensor in op.inputs]
        if not self._compiled and op.type == _UPDATE:
            x, update, begin = inputs
            end = begin + tf.shape(update, out_type=begin.dtype)
            steps = tf.ones_like(begin)
            return [tf.raw_ops.TensorStridedSliceUpdate(input=x, begin=begin, end=end, strides=steps, value=update)]
        attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_class")}
        if op.type in LOOPS_AND_BRANCHES:
            attributes["_lower_using_switch_merge"] = tf.compat.v1.AttrValue(b=not self._compiled)
        for name in functions_of(attributes):
            graph._add_function_recursive(self._graph._get_function(name))
        with tf.control_dependencies(self.controls([op])), tf.device(op.device):
            copy = graph._create_op_internal(
                op.type,
                inputs,
                [output.dtype for output in op.outputs],
                name=op.name,
                attrs=attributes,
                op_def=op.op_def,
            )
        for old, new in zip(op.outputs, copy.outputs, strict=True):
            if old.dtype in _HANDLES:
                handle_data_util.copy_handle_data(old, new)
            else:
                new.set_shape(old.shape)
        self._operations[op] = copy
        return list(copy.outputs)


def needs_xla_inside(graph: tf.Graph) -> bool:
    """Return True if a function that a graph calls has an operation that runs in a program for XLA only.

    Such operations of the graph itself are replaced when they are copied.
    """
    functions = graph.as_graph_def().library.function
    return any(node.op == _UPDATE for function in functions for node in function.node_def)


def static_value(tensor: tf.Tensor) -> list[int] | np.ndarray | None:
    """Return the value of a tensor that is known while its graph is traced, or None."""
    op = tensor.op
    if op.type == "VariableShape":
        data = handle_data_util.get_resource_handle_data(op.inputs[0])
        shape = tf.TensorShape(data.shape_and_type[0].shape) if data.shape_and_type else tf.TensorShape(None)
        return shape.as_list() if shape.is_fully_defined() else None
    if op.type == "ShapeN":
        is_known = all(each.shape.is_fully_defined() for each in op.inputs)
        return op.inputs[tensor.value_index].shape.as_list() if is_known else None
    value: np.ndarray | None = tf.get_static_value(tensor)
    return value


def is_derived(tensor: tf.Tensor) -> bool:
    """Return True for integers that follow from constants and from the shapes of variables and tensors.

    XLA needs such values while it compiles, so each program has its own copy of their operations.
    """
    if tensor.dtype not in (tf.int32, tf.int64):
        return False
    pending = [tensor]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        op = each.op
        if id(each) in seen or op.type == "Const" or static_value(each) is not None:
            continue
        seen.add(id(each))
        if not op.inputs or op.op_def.is_stateful or len(seen) > _MOST_DERIVED:
            return False
        if any(taken.dtype not in (tf.int32, tf.int64, tf.bool) for taken in op.inputs):
            return False
        pending += op.inputs
    return True
