"""The graph of a step with its programs for XLA, which is copied into the graph of a function that runs it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from hvdkit.cluster.logs import get_logger
from hvdkit.compiling.rebuilding import Copies, is_derived
from hvdkit.compiling.stages import Stage, Stages
from hvdkit.compiling.structures import Structure

_NAMES = re.compile(r", metadata=\{[^}]*\}|^HloModule [^,\n]*|_\d+\b|_\d+(?=_)", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """A stage of a graph that XLA compiles.

    Attributes:
        inputs: tensors of the graph that it takes.
        outputs: tensors of the graph that others take.
        function: computes copies of ``outputs`` from copies of ``inputs``.
        structure: digest of its operations, which identifies it in this process.
        digest: of what it computes; equal programs give equal results, to the last bit, in all processes.
    """

    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    function: tf.types.experimental.PolymorphicFunction
    structure: str
    digest: str = ""


class CompiledGraph:
    """A traced step, in which stages are programs for XLA.

    Args:
        concrete: the traced step; takes tensors only.
        shared: programs of earlier graphs of the step by their structure, which serve this graph, too.

    Attributes:
        stages: the stages of the graph.
        programs: the programs, by the level of their stage.
        refused: why stages that are worth a program cannot be compiled, by level.
    """

    def __init__(self, concrete: tf.types.experimental.ConcreteFunction, shared: Mapping[str, Program]) -> None:
        self._shared = shared
        self._graph = concrete.graph
        self._structure = concrete.graph.structured_outputs
        self._arguments = self._graph.inputs[: len(self._graph.inputs) - len(self._graph.captures)]
        self.stages = Stages(self._graph)
        self._structure_of = Structure(self._graph, self.stages.library).digest
        self.programs: dict[int, Program] = {}
        self.refused: dict[int, str] = {}
        if self._graph.deferred_external_captures:
            self.refused[0] = "values that are captured at each call"
            return
        users = _users(self.stages.all, self._graph.outputs)
        for stage in self.stages.all:
            if stage.is_program:
                self._compile(stage, users)

    def _compile(self, stage: Stage, users: dict[int, set[int | None]]) -> None:
        program = self._program(stage, users)
        if (earlier := self._shared.get(program.structure)) is not None:
            self.programs[stage.level] = replace(program, function=earlier.function, digest=earlier.digest)
            return
        if any(tensor.dtype in (tf.variant, tf.resource) for tensor in (*program.inputs, *program.outputs)):
            self.refused[stage.level] = "a list of tensors, such as a TensorArray, which is also used outside"
            return
        if not all(tensor.shape.is_fully_defined() for tensor in program.inputs):
            self.refused[stage.level] = "shapes that are unknown before the step runs"
            return
        try:
            # With specs instead of tensors, TensorFlow 2.21 crashes if a program also captures variables.
            examples = [tf.zeros(tensor.shape, tensor.dtype) for tensor in program.inputs]
            text = program.function.experimental_get_compiler_ir(*examples)(stage="hlo")
            self.programs[stage.level] = replace(program, digest=_digest(text))
        except Exception as error:
            get_logger().debug("XLA: %s", error)
            self.refused[stage.level] = first_line(error)

    def _program(self, stage: Stage, users: dict[int, set[int | None]]) -> Program:
        graph = self._graph
        inputs, outputs = _borders(graph, stage, users)

        def program(*tensors: tf.Tensor) -> list[tf.Tensor]:
            copies = Copies(graph, zip(inputs, tensors, strict=True), compiled=True)
            for op in stage.operations:
                copies.copy(op)
            return [copies[tensor] for tensor in outputs]

        function = tf.function(program, jit_compile=True, autograph=False)
        return Program(inputs, outputs, function, self._structure_of(stage.operations, inputs, outputs))

    def keep(self, levels: set[int]) -> None:
        """Keep the programs of some levels only."""
        self.programs = {level: program for level, program in self.programs.items() if level in levels}

    def emit(self, tensors: Sequence[tf.Tensor]) -> object:
        """Copy the graph into the one that is being traced; return the results.

        Args:
            tensors: the arguments.
        """
        copies = Copies(self._graph, zip(self._arguments, tensors, strict=True), compiled=False)
        for stage in self.stages.all:
            program = self.programs.get(stage.level)
            if program is None:
                for op in stage.operations:
                    copies.copy(op)
                continue
            with tf.control_dependencies(copies.controls(stage.operations)):
                results = program.function(*(copies[tensor] for tensor in program.inputs))
            copies.add(program.outputs, results)
            copies.stand_for(stage.operations, _last_call())
        return tf.nest.map_structure(
            lambda leaf: copies[leaf] if isinstance(leaf, tf.Tensor) else leaf, self._structure, expand_composites=True
        )


def structures_of(concrete: tf.types.experimental.ConcreteFunction) -> set[str]:
    """Return the structures of the stages of a traced step, without compiling anything."""
    graph = concrete.graph
    stages = Stages(graph)
    users = _users(stages.all, graph.outputs)
    structure_of = Structure(graph, stages.library).digest
    found: set[str] = set()
    for stage in stages.all:
        inputs, outputs = _borders(graph, stage, users)
        found.add(structure_of(stage.operations, inputs, outputs))
    return found


def _borders(
    graph: tf.Graph, stage: Stage, users: Mapping[int, set[int | None]]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the tensors that a stage takes from others, and those that others take from it."""
    mine = set(stage.operations)
    captured = {id(inner) for _, inner in graph.captures}
    inputs: dict[int, tf.Tensor] = {}
    for op in stage.operations:
        for tensor in op.inputs:
            is_given = tensor.op in mine or tensor.op.type == "Const" or id(tensor) in captured
            if not (is_given or is_derived(tensor)):
                inputs[id(tensor)] = tensor
    outputs = [tensor for op in stage.operations for tensor in op.outputs]
    return list(inputs.values()), [tensor for tensor in outputs if users.get(id(tensor), set()) - {stage.level}]


def _last_call() -> tf.Operation:
    """Return the operation that has called the last function in the graph that is being traced."""
    operations = tf.compat.v1.get_default_graph().get_operations()
    return next(op for op in reversed(operations) if op.type in ("PartitionedCall", "StatefulPartitionedCall"))


def _users(stages: Sequence[Stage], outputs: Sequence[tf.Tensor]) -> dict[int, set[int | None]]:
    """Return the levels that use a tensor, by its id; None stands for the results."""
    users: dict[int, set[int | None]] = {}
    for stage in stages:
        for op in stage.operations:
            for tensor in op.inputs:
                users.setdefault(id(tensor), set()).add(stage.level)
    for tensor in outputs:
        users.setdefault(id(tensor), set()).add(None)
    return users


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def _digest(program: str) -> str:
    """Return a digest of a program's text without source lines, and without the numbers in the names of functions."""
    return hashlib.sha256(_NAMES.sub("", program).encode()).hexdigest()
