"""Digests of what parts of graphs compute, without XLA: equal digests in one process mean equal programs.

A step is traced for each combination of shapes. Its update is the same in all of these graphs, so one program serves
them all, and no later graph can fail to compile it on one rank only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.compiling.operations import Library, functions_of
from hvdkit.compiling.rebuilding import static_value

_HANDLES = (tf.resource, tf.variant)


class Structure:
    """The digest of a list of operations of a graph, of the tensors that they take, and of those that others take."""

    def __init__(self, graph: tf.Graph, library: Library) -> None:
        self._library = library
        self._functions: dict[str, str] = {}  # their digests
        self._captured = {id(inner): outer for outer, inner in graph.captures}

    def digest(
        self, operations: Sequence[tf.Operation], inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]
    ) -> str:
        """Return the digest of operations, in an order in which they can run, and of their inputs and outputs."""
        places = {op: place for place, op in enumerate(operations)}
        given = {id(tensor): f"input {place} {tensor.dtype} {tensor.shape}" for place, tensor in enumerate(inputs)}
        text = hashlib.sha256()
        for op in operations:
            taken = [self._source(tensor, places, given) for tensor in op.inputs]
            controls = sorted(places[each] for each in op.control_inputs if each in places)
            text.update(f"{self._operation(op)} {taken} {controls}\n".encode())
        text.update(str([(places[tensor.op], tensor.value_index) for tensor in outputs]).encode())
        return text.hexdigest()

    def _source(self, tensor: tf.Tensor, places: Mapping[tf.Operation, int], given: Mapping[int, str]) -> str:
        """Describe where a tensor comes from."""
        if id(tensor) in given:
            return given[id(tensor)]
        if tensor.op in places:
            return f"{places[tensor.op]}:{tensor.value_index}"
        captured = self._captured.get(id(tensor))
        if captured is None:  # a constant, or a value that is derived from constants
            value = static_value(tensor)
            if value is not None:
                return _constant(tensor, value)
            taken = [self._source(each, places, given) for each in tensor.op.inputs]
            return f"({self._operation(tensor.op)} {taken}):{tensor.value_index}"
        if captured.dtype in _HANDLES or not hasattr(captured, "numpy"):
            return f"captured {id(captured)}"
        return _constant(captured, captured.numpy())

    def _operation(self, op: tf.Operation) -> str:
        return f"{op.type} {op.device} {self._attributes(op.node_def.attr)}"

    def _attributes(self, attributes: Mapping[str, tf.compat.v1.AttrValue]) -> str:
        return f"{_values(attributes)} {[self._function(name) for name in functions_of(attributes)]}"

    def _function(self, name: str) -> str:
        """Return the digest of a function that operations call."""
        if name not in self._functions:
            self._functions[name] = "itself"  # if it is called by itself
            nodes = self._library.nodes_of(name)
            inner = [f"{node.name} {node.op} {list(node.input)} {self._attributes(node.attr)}" for node in nodes]
            self._functions[name] = hashlib.sha256(str(inner).encode()).hexdigest()
        return self._functions[name]


def _constant(tensor: tf.Tensor, value: npt.ArrayLike) -> str:
    data = np.asarray(value).tobytes() if tensor.dtype != tf.string else repr(value).encode()
    return f"{tensor.dtype} {tensor.shape} {hashlib.sha256(data).hexdigest()}"


def _values(attributes: Mapping[str, tf.compat.v1.AttrValue]) -> list[str]:
    """Return attributes as text, without functions and TensorFlow's own, which contain numbers of this process."""
    return [
        f"{name}={value.SerializeToString(deterministic=True)!r}"
        for name, value in sorted(attributes.items())
        if not name.startswith("_") and not functions_of({name: value})
    ]
