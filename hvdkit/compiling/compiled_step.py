"""``hk.compiled``: a training step whose computation is compiled by XLA, with its exchanges between ranks outside.

Horovod has no XLA kernels, so the step is traced as usual, and the parts of its graph before, between and after the
exchanges become programs. What XLA cannot compile with the same results runs as in the step that is not compiled.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import keras
import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.cluster.logs import get_logger
from hvdkit.collectives.conversion import graph_safe
from hvdkit.compiling.operations import is_collective
from hvdkit.compiling.programs import CompiledGraph, first_line
from hvdkit.compiling.settings import mode
from hvdkit.errors import describe
from hvdkit.internals import ResourceVariable

Step = TypeVar("Step", bound=Callable[..., Any])
MOST_SIGNATURES = 8
_COMPOSITES = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices, tf.experimental.ExtensionType)
_MOST_SHOWN = 4
_OF_VARIABLES = ("trainable", "name", "dtype", "constraint", "synchronization", "aggregation", "shape")


def compiled(step: Step) -> Step:
    """Return a training step whose computation is compiled by XLA; also a decorator.

    The results are those of the step without XLA, up to rounding, on any number of ranks. The step is traced like a
    ``tf.function``, and what lies between its exchanges is compiled: usually one program for the forward and backward
    pass, and one for the update. Exchanges, random numbers, lookups of rows by ids of the batch, assertions, and
    everything for which XLA has no kernel run outside. A program that XLA cannot compile runs uncompiled, on all ranks.
    The chief logs what was compiled, and what was not with the reason.

    XLA compiles for fixed shapes, so the step is compiled for each of the first 8 combinations of its arguments'
    shapes. For more, only what does not depend on them is compiled.

    Args:
        step: a function of tensors, arrays and Python values, or a ``tf.function``. Like a ``tf.function``, it is
            traced for each value of an argument that is neither tensor nor array. Every rank calls it; shapes may
            differ between ranks.

    Returns:
        A function with the arguments of ``step`` that returns what a ``tf.function`` would.

    Raises:
        TypeError: ``step`` is not callable.
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
    run: Callable[..., Any] = tf.function(step) if mode() == "off" else CompiledStep(step)

    @functools.wraps(step)
    @graph_safe
    def compiled_step(*args: Any, **kwargs: Any) -> Any:
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
        programs: number of programs in these.
        seconds: spent on tracing and compiling, the first run of each graph included.
    """

    def __init__(self, step: Callable[..., Any], *, autograph: bool = True, label: str = "") -> None:
        self._step: Callable[..., Any] = getattr(step, "python_function", step)  # of a tf.function
        self._autograph: bool = getattr(step, "_autograph", autograph)
        self._name = getattr(self._step, "__name__", "step")
        self._label = label or f"hk.compiled: {self._name}"
        self._graphs: dict[Hashable, _Graph] = {}
        self._relaxed: dict[Hashable, _Graph] = {}
        self._levels: set[int] | None = None  # those that all ranks compile; None before the first call
        self.signatures = 0
        self.programs = 0
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        key = _signature((args, kwargs))
        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
        tensors = [tf.convert_to_tensor(leaf) for leaf in leaves if _is_tensor(leaf)]
        graph = self._graphs.get(key)
        if graph is None:
            return self._first_call(key, args, kwargs, tensors)
        return graph(tensors)

    def _first_call(self, key: Hashable, args: Any, kwargs: Any, tensors: list[tf.Tensor]) -> Any:
        """Run the step with a new signature."""
        began = time.monotonic()
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        if self.signatures < MOST_SIGNATURES:
            graph = self._trace(args, kwargs, specs)
            self._graphs[key] = graph
            self.signatures += 1
        else:
            graph = self._relaxed_graph(args, kwargs, specs)
        result = graph(tensors)
        self.seconds += time.monotonic() - began
        return result

    def _relaxed_graph(self, args: Any, kwargs: Any, specs: list[tf.TensorSpec]) -> _Graph:
        """Return a graph for arguments of many shapes."""
        key = _signature((args, kwargs), shapes=False)
        if key not in self._relaxed:
            get_logger().info(
                "%s: more than %d combinations of shapes: for others, what depends on them runs uncompiled",
                self._label,
                MOST_SIGNATURES,
            )
            ranks = [spec.shape.rank for spec in specs]
            shapes = [None if rank is None else [None] * rank for rank in ranks]
            relaxed = [tf.TensorSpec(shape, spec.dtype) for shape, spec in zip(shapes, specs, strict=True)]
            self._relaxed[key] = self._trace(args, kwargs, relaxed)
        return self._relaxed[key]

    def _trace(self, args: Any, kwargs: Any, specs: Sequence[tf.TensorSpec]) -> _Graph:
        """Trace the step; have XLA check its programs."""
        step = self._step
        structure = _without_tensors((args, kwargs))
        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
        places = [place for place, leaf in enumerate(leaves) if _is_tensor(leaf)]
        values = [None if _is_tensor(leaf) else leaf for leaf in leaves]

        def flat(*tensors: tf.Tensor) -> Any:
            given = list(values)
            for place, tensor in zip(places, tensors):  # noqa: B905  # AutoGraph does not know strict
                given[place] = tensor
            positional, named = tf.nest.pack_sequence_as(structure, given, expand_composites=True)
            with tf.variable_creator_scope(_create_now):
                return step(*positional, **named)

        flat.__name__ = self._name  # by which ranks match their exchanges
        concrete = tf.function(flat, autograph=self._autograph).get_concrete_function(*specs)
        with tf.init_scope():
            graph = _Graph(concrete, specs)
            self._agree(graph)
        self.programs += len(graph.programs)
        return graph

    def _agree(self, graph: _Graph) -> None:
        """Keep the programs that all ranks can compile. Later shapes, which may differ by rank, have the same ones."""
        mine = graph.programs
        if self._levels is None:
            ranks = [mine]
            if graph.has_exchange:
                # Not the label, since Keras numbers the names of models per process.
                ranks = gather(cluster.exchange(), f"programs of {self._name}", lambda: mine)
            # What follows an exchange has to give equal results on all ranks: replicas would drift apart.
            first = graph.first_exchange
            self._levels = {
                level
                for level, digest in mine.items()
                if all(level in each and (level < first or each[level] == digest) for each in ranks)
            }
            self._report(graph)
        graph.keep(self._levels)

    def _report(self, graph: _Graph) -> None:
        """Log on the chief what is compiled, and what is not."""
        if not cluster.is_chief():
            return
        levels = self._levels or set()
        kept = [*graph.refused, *["a program: another rank cannot compile it"] * len(graph.programs.keys() - levels)]
        kept += graph.outside
        shown = "; ".join(kept[:_MOST_SHOWN]) + (f"; and {len(kept) - _MOST_SHOWN} more" * (len(kept) > _MOST_SHOWN))
        inside, total = graph.operations(levels)
        number = f"{len(levels)} program{'s' * (len(levels) != 1)}"
        text = f"XLA compiles {inside:,} of {total:,} operations, in {number}" if levels else "XLA compiles nothing"
        get_logger().info("%s: %s%s", self._label, text, f"; not compiled: {shown}" if shown else "")


class _Graph:
    """A traced step that can be called.

    Args:
        concrete: the traced step; takes tensors only.
        specs: of these tensors.

    Attributes:
        refused: why it, or parts of it, cannot be compiled.
    """

    def __init__(self, concrete: Any, specs: Sequence[tf.TensorSpec]) -> None:
        self._concrete = concrete
        self._specs = specs
        self._compiled: CompiledGraph | None = None
        self._function = concrete
        self.refused: list[str] = []
        try:
            self._compiled = CompiledGraph(concrete)
            self._function = self._copied()
            self.refused = [f"a program: {reason}" for reason in self._compiled.refused.values()]
        except Exception as error:  # on this rank, perhaps, only: the step runs as it was traced
            get_logger().debug("XLA: %s", error, exc_info=True)
            self._compiled = None
            self._function = concrete
            self.refused = [f"{type(error).__name__}: {first_line(error)}"]

    def _copied(self) -> Any:
        assert self._compiled is not None
        emit = self._compiled.emit
        return tf.function(lambda *tensors: emit(tensors), autograph=False).get_concrete_function(*self._specs)

    @property
    def programs(self) -> dict[int, str]:
        """Return the digests of the programs by level."""
        programs = {} if self._compiled is None else self._compiled.programs
        return {level: program.digest for level, program in programs.items()}

    @property
    def outside(self) -> list[str]:
        """Return the operations that are not compiled, with the reasons."""
        return [] if self._compiled is None else self._compiled.stages.outside

    @property
    def has_exchange(self) -> bool:
        """Return True if the step exchanges something between ranks."""
        nodes = self._concrete.graph.as_graph_def()
        inner = (node for function in nodes.library.function for node in function.node_def)
        return any(is_collective(node.op) for node in (*nodes.node, *inner))

    @property
    def first_exchange(self) -> int:
        """Return the level of the first exchange."""
        return 0 if self._compiled is None else min(self._compiled.stages.levels_of_exchanges, default=0)

    def operations(self, levels: set[int]) -> tuple[int, int]:
        """Return the number of operations in the programs of some levels, and of all."""
        stages = [] if self._compiled is None else self._compiled.stages.all
        inside = sum(len(stage.operations) for stage in stages if stage.level in levels)
        return inside, sum(len(stage.operations) for stage in stages)

    def keep(self, levels: set[int]) -> None:
        """Compile the programs of some levels only."""
        if self._compiled is not None and not self.programs.keys() <= levels:
            self._compiled.keep(levels)
            self._function = self._copied()

    def __call__(self, tensors: list[tf.Tensor]) -> Any:
        if tf.inside_function() and self._compiled is not None:
            return self._compiled.emit(tensors)
        return self._function(*tensors)


def _create_now(create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
    """Create a variable outside of the graph that is being traced, with its value.

    Otherwise TensorFlow would trace the step twice, or assign the value in a branch of its graph.
    """
    value = options.get("initial_value")
    if not callable(value):
        return create(**options)
    taken = {name: option for name, option in options.items() if name in _OF_VARIABLES}
    with tf.init_scope():
        return ResourceVariable(**(taken | {"initial_value": value()}))


def _without_tensors(structure: Any) -> Any:
    """Return a structure without its tensors, which would otherwise stay in memory with the graph."""
    if any(isinstance(leaf, _COMPOSITES) for leaf in tf.nest.flatten(structure)):
        return structure
    return tf.nest.map_structure(lambda leaf: None if _is_tensor(leaf) else leaf, structure)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (tf.Tensor, np.ndarray, np.generic))


def _signature(x: Any, *, shapes: bool = True) -> Hashable:
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
