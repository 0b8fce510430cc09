"""``hk.compiled``: a training step whose computation is compiled by XLA, with its exchanges between ranks outside.

Horovod has no XLA kernels, so the step is traced as usual, and the parts of its graph before, between and after the
exchanges become programs. What XLA cannot compile with the same results runs as in the step that is not compiled.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias, TypeVar, cast

import keras
import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives.conversion import graph_safe
from hvdkit.collectives.graphs import divide_for_xla, error_of_xla
from hvdkit.compiling.operations import has_exchange_for_xla
from hvdkit.compiling.programs import Program, StepGraph, structures_of
from hvdkit.compiling.rebuilding import needs_xla_inside
from hvdkit.compiling.settings import mode
from hvdkit.compiling.uncompiled_step import compare_modes, create_now, has_exchange, kind_of_agreement, uncompiled
from hvdkit.errors import describe, listed

Step = TypeVar("Step", bound=Callable[..., object])
Arguments: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
MOST_SIGNATURES = 8
_COMPOSITES = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices, tf.experimental.ExtensionType)
_MOST_SHOWN = 4


def compiled(step: Step) -> Step:
    """Return a training step whose computation is compiled by XLA; also a decorator.

    The results are those of the step without XLA, up to rounding, on any number of ranks. The step is traced like a
    ``tf.function``, and what lies between its exchanges is compiled: usually one program for the forward and backward
    pass, and one for the update. Exchanges, random numbers, lookups of rows by ids of the batch, assertions, and
    everything for which XLA has no kernel run outside. A program that XLA cannot compile runs uncompiled, on all ranks.
    The chief logs what was compiled, and what was not with the reason.

    XLA compiles for fixed shapes, so the step is compiled for each of the first 8 combinations of its arguments'
    shapes. For more, only what does not depend on them is compiled. The update is compiled once, for all of them: if it
    depends on the number of rows, it runs uncompiled, on all ranks. The chief logs the number of compiled programs, and
    the seconds.

    Args:
        step: a function of tensors, arrays and Python values, or a ``tf.function``. Like a ``tf.function``, it is
            traced for each value of an argument that is neither tensor nor array. Every rank calls it; shapes may
            differ between ranks.

    Returns:
        A function with the arguments of ``step`` that returns what a ``tf.function`` would.

    Raises:
        TypeError: ``step`` is not callable.
        CollectiveMismatchError: at the first call, only some ranks have HVDKIT_JIT_COMPILE=off.
        Exception: at the first call, what ``step`` raises while it is traced.

    Examples:
        >>> import keras
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.1))
        >>> @hk.compiled
        ... def train_step(x, y):
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        ...     optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        ...     return loss
        >>> x, y = tf.ones([8, 4]), tf.ones([8, 1])  # this rank's rows
        >>> [round(float(train_step(x, y)), 3) for _ in range(3)]
        [1.0, 0.0, 0.0]
    """
    if not callable(step):
        got = type(step).__name__
        raise TypeError(describe("step", got, "a function", "write @hk.compiled above the step, or hk.compiled(step)"))
    run: Callable[..., object] = uncompiled(step) if mode() == "off" else CompiledStep(step)

    @functools.wraps(step)
    @graph_safe
    def compiled_step(*args: object, **kwargs: object) -> object:
        return run(*args, **kwargs)

    return cast("Step", compiled_step)


class CompiledStep:
    """A step with one graph for each signature of its arguments.

    Args:
        step: a function, or a ``tf.function``.
        autograph: whether to convert Python's control flow, for a plain function.
        label: the step's name in log lines.

    Attributes:
        signatures: number of combinations of shapes for which the step was compiled.
        compilations: number of programs that XLA has compiled for these.
        seconds: spent on tracing and compiling, the first run of each graph included.
    """

    def __init__(self, step: Callable[..., object], *, autograph: bool = True, label: str = "") -> None:
        self._step: Callable[..., object] = getattr(step, "python_function", step)  # of a tf.function
        self._autograph: bool = getattr(step, "_autograph", autograph)
        self._name = getattr(self._step, "__name__", "step")
        self._label = label or f"hk.compiled: {self._name}"
        self._graphs: dict[Hashable, StepGraph] = {}
        self._relaxed: dict[Hashable, StepGraph | None] = {}  # None: it needs fixed shapes
        self._shapes: dict[Hashable, list[tf.TensorShape]] = {}  # that cover all arguments so far
        self._levels: set[int] | None = None  # of programs for the shapes of a graph; None before ranks have agreed
        self._shared: dict[str, Program] = {}  # programs that serve the graphs of all shapes, by structure
        self._refused: list[str] | None = None  # of the first graph
        self.signatures = 0
        self.compilations = 0
        self.seconds = 0.0

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the step."""
        arguments = (args, kwargs)
        key = _signature(arguments)
        leaves = tf.nest.flatten(arguments, expand_composites=True)
        tensors = [tf.convert_to_tensor(leaf) for leaf in leaves if _is_tensor(leaf)]
        graph = self._graphs.get(key)
        if graph is None:
            return self._first_call(key, arguments, tensors)
        return graph(tensors)

    def _first_call(self, key: Hashable, arguments: Arguments, tensors: list[tf.Tensor]) -> object:
        """Run the step with a new signature."""
        began = time.monotonic()
        before = self.compilations
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        self._note_shapes(arguments, specs)
        if self.signatures < MOST_SIGNATURES:
            graph = self._graph(arguments, specs)
            self._graphs[key] = graph
            self.signatures += 1
        else:
            graph = self._relaxed_graph(key, arguments, specs)
        result = graph(tensors)
        self.seconds += time.monotonic() - began
        if self.compilations > before and cluster.is_chief():
            get_logger().info(
                "%s: compiled %d program%s for %d combination%s of shapes, in %.1f s with tracing",
                self._label,
                self.compilations,
                "s" * (self.compilations != 1),
                self.signatures,
                "s" * (self.signatures != 1),
                self.seconds,
            )
        return result

    def _relaxed_graph(self, exact: Hashable, arguments: Arguments, specs: list[tf.TensorSpec]) -> StepGraph:
        """Return a graph for arguments of many shapes; for a step that needs fixed shapes, one for the given ones."""
        shapes = self._shapes[_signature(arguments, shapes=False)]
        key = (_signature(arguments, shapes=False), str(shapes))
        if not self._relaxed:
            get_logger().info(
                "%s: more than %d combinations of shapes: for others, what depends on them runs uncompiled",
                self._label,
                MOST_SIGNATURES,
            )
        if key not in self._relaxed:
            relaxed = [tf.TensorSpec(shape, spec.dtype) for shape, spec in zip(shapes, specs, strict=True)]
            try:
                self._relaxed[key] = self._graph(arguments, relaxed)
            except Exception as error:  # as in Python that computes with sizes
                get_logger().debug("%s: %s", self._label, error)
                self._relaxed[key] = None
        graph = self._relaxed[key]
        if graph is None or not self._shared.keys() <= {program.structure for program in graph.programs.values()}:
            graph = self._graph(arguments, specs, compiles_shapes=False)
            self._graphs[exact] = graph
        return graph

    def _note_shapes(self, arguments: Arguments, specs: list[tf.TensorSpec]) -> None:
        """Note which dimensions of the arguments change."""
        key = _signature(arguments, shapes=False)
        known = self._shapes.get(key) or [spec.shape for spec in specs]
        self._shapes[key] = [
            shape.most_specific_common_supertype([spec.shape]) or tf.TensorShape(None)
            for shape, spec in zip(known, specs, strict=True)
        ]

    def _trace(self, arguments: Arguments, specs: Sequence[tf.TensorSpec]) -> tf.types.experimental.ConcreteFunction:
        """Trace the step for XLA; without, if XLA's form of a loop or function could not run outside of a program."""
        concrete = self._traced(arguments, specs, for_xla=True)
        if has_exchange_for_xla(concrete.graph):
            raise error_of_xla()
        if needs_xla_inside(concrete.graph):
            concrete = self._traced(arguments, specs, for_xla=False)
        return concrete

    def _traced(
        self, arguments: Arguments, specs: Sequence[tf.TensorSpec], *, for_xla: bool
    ) -> tf.types.experimental.ConcreteFunction:
        """Trace the step; ``for_xla``, the gradients of loops and branches get the form that XLA compiles."""
        step = self._step
        structure = _without_tensors(arguments)
        leaves = tf.nest.flatten(arguments, expand_composites=True)
        places = [place for place, leaf in enumerate(leaves) if _is_tensor(leaf)]
        values = [None if _is_tensor(leaf) else leaf for leaf in leaves]

        def flat(*tensors: tf.Tensor) -> object:
            given = list(values)
            for place, tensor in zip(places, tensors):  # noqa: B905  # AutoGraph does not know strict
                given[place] = tensor
            positional, named = tf.nest.pack_sequence_as(structure, given, expand_composites=True)
            divide_for_xla()
            with tf.variable_creator_scope(create_now):
                return step(*positional, **named)

        flat.__name__ = self._name  # by which ranks match their exchanges
        return tf.function(flat, autograph=self._autograph, jit_compile=for_xla or None).get_concrete_function(*specs)

    def _graph(
        self, arguments: Arguments, specs: Sequence[tf.TensorSpec], *, compiles_shapes: bool = True
    ) -> StepGraph:
        """Trace the step; have XLA check its programs, and if ``compiles_shapes``, also those for these shapes only."""
        concrete = self._trace(arguments, specs)
        with tf.init_scope():
            graph = StepGraph(concrete, specs, self._shared, lambda: self._traced(arguments, specs, for_xla=False))
            before = {id(program.function) for program in self._shared.values()}
            if has_exchange(concrete.graph) and cluster.size() > 1:
                if self._levels is None:
                    self._levels = self._agreed_levels(graph, arguments, specs)
                levels = self._levels if compiles_shapes else set()
                programs = graph.programs.items()
                graph.keep({level for level, each in programs if each.structure in self._shared or level in levels})
            elif not compiles_shapes:
                graph.keep(set())
            self._report(graph)
            self.compilations += sum(id(program.function) not in before for program in graph.programs.values())
        return graph

    def _structures_of_others(self, arguments: Arguments, specs: Sequence[tf.TensorSpec]) -> set[str] | None:
        """Return the structures of the step for another number of rows; None if it takes no other."""
        rows = next((spec.shape[0] for spec in specs if spec.shape.rank), None)
        if rows is None:
            return None
        others = [
            tf.TensorSpec([rows + 1, *spec.shape[1:]], spec.dtype)
            if spec.shape.rank and spec.shape[0] == rows
            else spec
            for spec in specs
        ]
        try:
            return structures_of(self._trace(arguments, others))
        except Exception as error:
            get_logger().debug("%s: %s", self._label, error)
            return None

    def _agreed_levels(self, graph: StepGraph, arguments: Arguments, specs: Sequence[tf.TensorSpec]) -> set[int]:
        """Choose on all ranks the programs of the step from those of the graph of the first shapes.

        What follows an exchange has to give equal results on all ranks: replicas would drift apart. That has to hold
        for all graphs to come, whose shapes may differ by rank. So a program after an exchange serves all shapes. If it
        depends on the shapes, it is compiled only before another exchange, e.g. the pass of a model that exchanges
        the statistics of a batch, if it is the same on all ranks for the first shapes.

        Returns:
            The levels of the programs for the shapes of a graph. Programs for all shapes are added to the shared ones.
        """
        first, last = graph.levels_of_exchanges

        def value() -> tuple[str, dict[int, tuple[str, bool]]]:
            is_after = any(level > first for level in graph.programs)
            structures = self._structures_of_others(arguments, specs) if is_after else None
            return mode(), {
                level: (program.digest, level > first and (structures is None or program.structure in structures))
                for level, program in graph.programs.items()
            }

        # Not the label, since Keras numbers the names of models per process.
        ranks = gather(cluster.exchange(), kind_of_agreement(self._name), value)
        compare_modes([each for each, _ in ranks])
        programs = [each for _, each in ranks]
        levels: set[int] = set()
        for level, program in graph.programs.items():
            if not all(level in each for each in programs):
                continue
            is_equal = len({each[level][0] for each in programs}) == 1
            if is_equal and all(each[level][1] for each in programs):
                self._shared[program.structure] = program
            elif level < first or (is_equal and level < last):
                levels.add(level)
        return levels

    def _report(self, graph: StepGraph) -> None:
        """Log what is compiled, and what is not: on the chief for the first graph, later what this rank refuses."""
        if self._refused is not None:
            new = [reason for reason in graph.refused if reason not in self._refused]
            if new and graph.has_fixed_shapes:  # perhaps on this rank only
                get_logger().warning("%s: not compiled for other shapes: %s", self._label, _shown(new))
            return
        self._refused = list(graph.refused)
        if not cluster.is_chief():
            return
        number = len(graph.programs)
        kept = [*graph.refused, *["a program: not the same for all ranks and shapes"] * graph.dropped, *graph.outside]
        inside, total = graph.operations()
        programs = f"{number} program{'s' * (number != 1)}"
        text = f"XLA compiles {inside:,} of {total:,} operations, in {programs}" if number else "XLA compiles nothing"
        get_logger().info("%s: %s%s", self._label, text, f"; not compiled: {_shown(kept)}" if kept else "")


def _shown(reasons: Sequence[str]) -> str:
    """Return the first reasons, for a log line."""
    return listed(reasons, _MOST_SHOWN, separator="; ")


def _without_tensors(structure: object) -> object:
    """Return a structure without its tensors, which would otherwise stay in memory with the graph."""
    if any(isinstance(leaf, _COMPOSITES) for leaf in tf.nest.flatten(structure)):
        return structure
    return tf.nest.map_structure(lambda leaf: None if _is_tensor(leaf) else leaf, structure)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, (tf.Tensor, np.ndarray, np.generic))


def _signature(x: object, *, shapes: bool = True) -> Hashable:
    """Return the shapes and dtypes of tensors in ``x``, and its structure and other values."""
    if isinstance(x, (tf.Tensor, np.ndarray, np.generic)):
        shape = tf.TensorShape(x.shape)
        if shape.rank is None:
            return (tf.as_dtype(x.dtype), None)
        return (tf.as_dtype(x.dtype), tuple(shape) if shapes else shape.rank)
    if isinstance(x, dict):
        return tuple((key, _signature(value, shapes=shapes)) for key, value in x.items())
    if isinstance(x, (list, tuple)):
        return (type(x), *(_signature(value, shapes=shapes) for value in x))
    if isinstance(x, (tf.Variable, keras.Variable)):
        return id(x)
    if isinstance(x, _COMPOSITES):
        return tuple(_signature(part, shapes=shapes) for part in tf.nest.flatten(x, expand_composites=True))
    try:
        hash(x)
    except TypeError:
        return id(x)
    return (type(x), x)
