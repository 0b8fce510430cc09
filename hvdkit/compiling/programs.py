"""The graph of a step, copied into the graph of a function in which stages are programs for XLA."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from hvdkit.cluster.logs import get_logger
from hvdkit.compiling.operations import CALLS
from hvdkit.compiling.rebuilding import Copies, is_derived
from hvdkit.compiling.stages import Stage, Stages
from hvdkit.compiling.structures import Structure

_NAMES = re.compile(r", metadata=\{[^}]*\}|^HloModule [^,\n]*|_\d+\b|_\d+(?=_)", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """A stage of a graph that XLA compiles. Those with equal digests give equal results, to the last bit."""

    inputs: list[tf.Tensor]  # tensors of the graph that it takes
    outputs: list[tf.Tensor]  # tensors of the graph that others take
    function: tf.types.experimental.PolymorphicFunction  # computes copies of the outputs from copies of the inputs
    structure: str  # digest of its operations, which identifies it in this process
    digest: str  # of what it computes, in all processes


class StepGraph:
    """A traced step that can be called, in which stages are programs for XLA.

    If the graph cannot be copied, perhaps only on this rank, the step runs as it does without XLA.

    Args:
        concrete: the traced step; takes tensors only.
        specs: of these tensors.
        shared: programs of earlier graphs of the step by their structure, which serve this graph, too.
        trace: traces the step as it runs without XLA.

    Attributes:
        programs: the programs, by the level of their stage.
        refused: why the step, or stages that are worth a program, cannot be compiled.
        dropped: number of programs that could be compiled and are not.
        outside: the operations that are not compiled, with the reasons.
        levels_of_exchanges: the levels of the first and of the last exchange.
    """

    def __init__(
        self,
        concrete: tf.types.experimental.ConcreteFunction,
        specs: Sequence[tf.TensorSpec],
        shared: Mapping[str, Program],
        trace: Callable[[], tf.types.experimental.ConcreteFunction],
    ) -> None:
        self._graph = concrete.graph
        self._specs = specs
        self._stages: list[Stage] = []  # none if the step runs without XLA
        self.programs: dict[int, Program] = {}
        self.refused: list[str] = []
        self.dropped = 0
        self.outside: list[str] = []
        self.levels_of_exchanges = (0, 0)
        try:
            stages = Stages(self._graph)
            self._stages = stages.all
            self._compile(stages, shared)
            self._function = self._copied()
        except Exception as error:
            get_logger().debug("XLA: %s", error, exc_info=True)
            self._stages = []
            self.programs = {}
            self._function = trace()
            self.refused = [f"{type(error).__name__}: {_first_line(error)}"]
            return
        self.outside = stages.outside
        levels = stages.levels_of_exchanges or {0}
        self.levels_of_exchanges = (min(levels), max(levels))

    def _compile(self, stages: Stages, shared: Mapping[str, Program]) -> None:
        """Make programs of the stages that are worth it, as far as XLA compiles them."""
        if self._graph.deferred_external_captures:
            self.refused.append("a program: values that are captured at each call")
            return
        chosen = [stage for stage in stages.all if stage.is_program]
        for stage, inputs, outputs, structure in _with_borders(chosen, self._graph, stages):
            if (earlier := shared.get(structure)) is not None:
                self.programs[stage.level] = replace(earlier, inputs=inputs, outputs=outputs)
            elif any(tensor.dtype in (tf.variant, tf.resource) for tensor in (*inputs, *outputs)):
                self.refused.append("a program: a list of tensors, such as a TensorArray, which is also used outside")
            elif not all(tensor.shape.is_fully_defined() for tensor in inputs):
                self.refused.append("a program: shapes that are unknown before the step runs")
            else:
                try:
                    self.programs[stage.level] = self._program(stage, inputs, outputs, structure)
                except Exception as error:
                    get_logger().debug("XLA: %s", error)
                    self.refused.append(f"a program: {_first_line(error)}")

    def _program(self, stage: Stage, inputs: list[tf.Tensor], outputs: list[tf.Tensor], structure: str) -> Program:
        """Return the program of a stage, which XLA has compiled."""
        graph = self._graph

        def program(*tensors: tf.Tensor) -> list[tf.Tensor]:
            copies = Copies(graph, zip(inputs, tensors, strict=True), compiled=True)
            for op in stage.operations:
                copies.copy(op)
            return [copies[tensor] for tensor in outputs]

        function = tf.function(program, jit_compile=True, autograph=False)
        # With specs instead of tensors, TensorFlow 2.21 crashes if a program also captures variables.
        examples = [tf.zeros(tensor.shape, tensor.dtype) for tensor in inputs]
        text = function.experimental_get_compiler_ir(*examples)(stage="hlo")
        return Program(inputs, outputs, function, structure, _digest(text))

    def _copied(self) -> tf.types.experimental.ConcreteFunction:
        """Return a function that runs the graph with its programs."""
        return tf.function(lambda *tensors: self._emit(tensors), autograph=False).get_concrete_function(*self._specs)

    def _emit(self, tensors: Sequence[tf.Tensor]) -> object:
        """Copy the graph into the one that is being traced, with ``tensors`` as arguments; return the results."""
        arguments = self._graph.inputs[: len(self._graph.inputs) - len(self._graph.captures)]
        copies = Copies(self._graph, zip(arguments, tensors, strict=True), compiled=False)
        for stage in self._stages:
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
            lambda leaf: copies[leaf] if isinstance(leaf, tf.Tensor) else leaf,
            self._graph.structured_outputs,
            expand_composites=True,
        )

    @property
    def has_fixed_shapes(self) -> bool:
        """Return True if the graph is for one combination of shapes."""
        return all(spec.shape.is_fully_defined() for spec in self._specs)

    def operations(self) -> tuple[int, int]:
        """Return the number of operations in programs, and of all."""
        inside = sum(len(stage.operations) for stage in self._stages if stage.level in self.programs)
        return inside, sum(len(stage.operations) for stage in self._stages)

    def keep(self, levels: set[int]) -> None:
        """Compile the programs of some levels only."""
        dropped = self.programs.keys() - levels
        if dropped:
            self.dropped = len(dropped)
            self.programs = {level: program for level, program in self.programs.items() if level in levels}
            self._function = self._copied()

    def __call__(self, tensors: list[tf.Tensor]) -> object:
        if tf.inside_function() and self._stages:
            return self._emit(tensors)
        return self._function(*tensors)


def structures_of(concrete: tf.types.experimental.ConcreteFunction) -> set[str]:
    """Return the structures of the stages of a traced step, without compiling anything."""
    stages = Stages(concrete.graph)
    return {structure for *_, structure in _with_borders(stages.all, concrete.graph, stages)}


def _with_borders(
    chosen: Sequence[Stage], graph: tf.Graph, stages: Stages
) -> Iterator[tuple[Stage, list[tf.Tensor], list[tf.Tensor], str]]:
    """Yield some stages of a graph with their inputs, outputs and structure.

    The inputs are the tensors that a stage takes from others, the outputs those that others take from it.
    """
    structure_of = Structure(graph, stages.library).digest
    captured = {id(inner) for _, inner in graph.captures}
    users: dict[int, set[int | None]] = {}  # the levels that use a tensor, by its id; None stands for the results
    for tensor in graph.outputs:
        users.setdefault(id(tensor), set()).add(None)
    for stage in stages.all:
        for op in stage.operations:
            for tensor in op.inputs:
                users.setdefault(id(tensor), set()).add(stage.level)
    for stage in chosen:
        mine = set(stage.operations)
        inputs: dict[int, tf.Tensor] = {}
        for op in stage.operations:
            for tensor in op.inputs:
                is_given = tensor.op in mine or tensor.op.type == "Const" or id(tensor) in captured
                if not (is_given or is_derived(tensor)):
                    inputs[id(tensor)] = tensor
        made = [tensor for op in stage.operations for tensor in op.outputs]
        outputs = [tensor for tensor in made if users.get(id(tensor), set()) - {stage.level}]
        taken = list(inputs.values())
        yield stage, taken, outputs, structure_of(stage.operations, taken, outputs)


def _last_call() -> tf.Operation:
    """Return the operation that has called the last function in the graph that is being traced."""
    operations = tf.compat.v1.get_default_graph().get_operations()
    return next(op for op in reversed(operations) if op.type in CALLS)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def _digest(program: str) -> str:
    """Return a digest of a program's text without source lines, and without the numbers in the names of functions."""
    return hashlib.sha256(_NAMES.sub("", program).encode()).hexdigest()
