"""Which operations XLA compiles with the results that TensorFlow computes, and why others stay outside.

A kernel for XLA is necessary but not sufficient. An operation that raises an error in TensorFlow must not become one
that returns another value: XLA removes assertions, and clamps the ids of lookups that are out of range.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.internals import get_registered_kernels_for_op

_CHECKS = frozenset({"Assert", "CheckNumerics", "CheckNumericsV2"})
_OF_VALUES = frozenset(
    {"Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "ListDiff", "DynamicPartition"}
    | {"NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5"}
)
LOOKUPS = frozenset({"ResourceGather", "ResourceGatherNd", "GatherV2", "Gather", "GatherNd"})
# Operations that make a program worth compiling. All others are cheap next to one of these.
HEAVY = frozenset(
    {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "While", "StatelessWhile"}
    | {"Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "Conv3D", "Conv3DBackpropInputV2"}
    | {"Conv3DBackpropFilterV2", "DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput"}
    | {"DepthwiseConv2dNativeBackpropFilter", "PartitionedCall", "StatefulPartitionedCall"}
)
# Operations that cost nothing, or whose place doesn't matter.
TRIVIAL = frozenset(
    {"Const", "Identity", "IdentityN", "NoOp", "Placeholder", "ReadVariableOp", "Shape", "Reshape", "Cast", "Pack"}
    | {"StopGradient", "StridedSlice", "ExpandDims", "Squeeze", "EnsureShape", "PreventGradient"}
)
_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
LOOPS_AND_BRANCHES = _BRANCHES | {"While", "StatelessWhile"}
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "StatefulUniform", "StatefulStandardNormal", "Shuffle")
_OF_SEEDS = frozenset({"StatelessRandomGetAlg", "StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg"})


@functools.cache
def _register_kernels() -> None:
    """Have TensorFlow register XLA's kernels, which it does when it compiles its first function."""
    with tf.init_scope():
        tf.function(lambda x: x + 1, jit_compile=True)(tf.zeros([]))


@functools.cache
def _kernels(kind: str) -> tuple[Any, ...]:
    """Return XLA's kernels of an operation for this process's first device."""
    _register_kernels()
    device = "XLA_GPU_JIT" if tf.config.list_logical_devices("GPU") else "XLA_CPU_JIT"
    return tuple(kernel for kernel in get_registered_kernels_for_op(kind).kernel if kernel.device_type == device)


def is_collective(kind: str) -> bool:
    """Return True for an operation of Horovod."""
    return kind.startswith("Horovod")


def functions_of(attributes: Mapping[str, tf.compat.v1.AttrValue]) -> list[str]:
    """Return the names of the functions that an operation calls: bodies of loops, branches."""
    names: list[str] = []
    for value in attributes.values():
        if value.HasField("func"):
            names.append(value.func.name)
        elif value.HasField("list"):
            names += [function.name for function in value.list.func]
    return names


class Library:
    """The functions that the operations of a graph call."""

    def __init__(self, graph: tf.Graph) -> None:
        self._functions = {each.signature.name: each for each in graph.as_graph_def().library.function}

    def placeholders(self, op: tf.Operation) -> list[tf.Tensor]:
        """Return the outputs of a branch that have no value if another branch has run: what its gradient needs."""
        return [tensor for place, tensor in enumerate(op.outputs) if self._is_placeholder(op.node_def, place)]

    def _is_placeholder(self, node: tf.compat.v1.NodeDef, place: int) -> bool:
        """Return True if an output of a node has no value in some runs."""
        if node.op == "FakeParam":
            return True
        if node.op not in _BRANCHES | CALLS:
            return False
        for name in functions_of(node.attr):
            function = self._functions[name]
            inner, _, output = function.ret[function.signature.output_arg[place].name].partition(":")
            found = next((each for each in function.node_def if each.name == inner), None)
            if found is not None and self._is_placeholder(found, int(output.rpartition(":")[2])):
                return True
        return False

    def nodes(self, attributes: Mapping[str, tf.compat.v1.AttrValue]) -> Iterator[tf.compat.v1.NodeDef]:
        """Yield the nodes of all functions that an operation calls, and of those that these call: of each once."""
        seen: set[str] = set()
        pending = list(functions_of(attributes))
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                nodes = self.nodes_of(name)
                yield from nodes
                pending.extend(called for node in nodes for called in functions_of(node.attr))

    def nodes_of(self, function: str) -> Sequence[tf.compat.v1.NodeDef]:
        """Return the nodes of a function; none for one that is not of the graph's own."""
        return self._functions[function].node_def if function in self._functions else ()


def has_exchange_for_xla(graph: tf.Graph) -> bool:
    """Return True if a function in ``graph`` that the program itself compiles by XLA has an exchange between ranks."""
    library = Library(graph)
    return any(
        is_collective(node.op) or any(is_collective(inner.op) for inner in library.nodes(node.attr))
        for function in graph.as_graph_def().library.function
        if function.attr["_XlaMustCompile"].b
        for node in function.node_def
    )


def reason_outside(op: tf.Operation, library: Library) -> str | None:
    """Return why an operation cannot be compiled, or None."""
    node = op.node_def
    reason = _reason_of_node(node.op, node.attr)
    if reason is None and any(tensor.dtype == tf.string for tensor in (*op.inputs, *op.outputs)):
        reason = "strings"
    if reason is None and any(tensor.op.type == "VarHandleOp" for tensor in op.inputs):
        reason = "a handle of a variable that the step looks up"
    if reason is None and node.op in _BRANCHES and not all(map(_is_fixed, op.outputs)):
        reason = "branches of different shapes"
    if reason is not None:
        return reason
    nodes = list(library.nodes(node.attr))
    if any(is_collective(inner.op) for inner in nodes):  # and hvdkit's records of it, for which XLA has no kernel
        return "an exchange between ranks inside"
    for inner in nodes:
        inside = _reason_of_node(inner.op, inner.attr)
        if inside is not None:
            return f"{inner.op} inside: {inside}"
    return None


def _reason_of_node(kind: str, attributes: Mapping[str, tf.compat.v1.AttrValue]) -> str | None:
    if is_collective(kind):
        return "an exchange between ranks"
    if kind in _CHECKS:
        return "XLA removes checks"
    if kind in _OF_VALUES:
        return "its shape depends on values"
    if _is_random(kind):
        return "XLA draws other random numbers"
    kernels = _kernels(kind)
    if not kernels:
        return "XLA has no kernel"
    return None if any(_takes(kernel, attributes) for kernel in kernels) else "XLA has no kernel for these types"


@functools.cache
def _is_random(kind: str) -> bool:
    """Return True for operations that draw random numbers. From the same seeds, XLA draws others, and more slowly."""
    return any(word in kind for word in _RANDOM) and kind not in _OF_SEEDS


def _takes(kernel: Any, attributes: Mapping[str, tf.compat.v1.AttrValue]) -> bool:
    """Return True if a kernel takes the types of an operation."""
    for constraint in kernel.constraint:
        allowed = constraint.allowed_values.list.type
        value = attributes.get(constraint.name)
        if allowed and value is not None and value.type and value.type not in allowed:
            return False
    return True


def _is_fixed(tensor: tf.Tensor) -> bool:
    return tensor.dtype in (tf.resource, tf.variant) or tensor.shape.is_fully_defined()


def has_values_shape(tensor: tf.Tensor) -> bool:
    """Return True if the shape of an operation's output is unknown before it runs."""
    return not _is_fixed(tensor)
