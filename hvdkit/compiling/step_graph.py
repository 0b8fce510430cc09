"""A traced step with compiled programs, for arguments of given shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from hvdkit.cluster.logs import get_logger
from hvdkit.compiling.programs import CompiledGraph, Program, first_line
from hvdkit.compiling.uncompiled_step import has_exchange


class StepGraph:
    """A traced step that can be called.

    Args:
        concrete: the traced step; takes tensors only.
        specs: of these tensors.
        shared: programs of earlier graphs, by structure.
        trace: traces the step as it runs without XLA.

    Attributes:
        refused: why it, or parts of it, cannot be compiled.
        dropped: number of programs that could be compiled and are not.
    """

    def __init__(
        self,
        concrete: tf.types.experimental.ConcreteFunction,
        specs: Sequence[tf.TensorSpec],
        shared: Mapping[str, Program],
        trace: Callable[[], tf.types.experimental.ConcreteFunction],
    ) -> None:
        self._concrete = concrete
        self._specs = specs
        self._compiled: CompiledGraph | None = None
        self._function = concrete
        self.refused: list[str] = []
        self.dropped = 0
        try:
            self._compiled = CompiledGraph(concrete, shared)
            self._function = self._copied()
            self.refused = [f"a program: {reason}" for reason in self._compiled.refused.values()]
        except Exception as error:  # on this rank, perhaps, only: the step runs as it was traced
            get_logger().debug("XLA: %s", error, exc_info=True)
            self._compiled = None
            self._function = trace()
            self.refused = [f"{type(error).__name__}: {first_line(error)}"]

    def _copied(self) -> tf.types.experimental.ConcreteFunction:
        assert self._compiled is not None
        emit = self._compiled.emit
        return tf.function(lambda *tensors: emit(tensors), autograph=False).get_concrete_function(*self._specs)

    @property
    def programs(self) -> dict[int, Program]:
        """Return the programs by level."""
        return {} if self._compiled is None else self._compiled.programs

    @property
    def outside(self) -> list[str]:
        """Return the operations that are not compiled, with the reasons."""
        return [] if self._compiled is None else self._compiled.stages.outside

    @property
    def has_fixed_shapes(self) -> bool:
        """Return True if the graph is for one combination of shapes."""
        return all(spec.shape.is_fully_defined() for spec in self._specs)

    @property
    def has_exchange(self) -> bool:
        """Return True if the step exchanges something between ranks."""
        return has_exchange(self._concrete.graph)

    @property
    def levels_of_exchanges(self) -> tuple[int, int]:
        """Return the levels of the first and of the last exchange."""
        found = set() if self._compiled is None else self._compiled.stages.levels_of_exchanges
        levels = found or {0}
        return min(levels), max(levels)

    def operations(self) -> tuple[int, int]:
        """Return the number of operations in programs, and of all."""
        stages = [] if self._compiled is None else self._compiled.stages.all
        inside = sum(len(stage.operations) for stage in stages if stage.level in self.programs)
        return inside, sum(len(stage.operations) for stage in stages)

    def keep(self, levels: set[int]) -> None:
        """Compile the programs of some levels only."""
        if self._compiled is not None and not self.programs.keys() <= levels:
            self.dropped = len(self.programs.keys() - levels)
            self._compiled.keep(levels)
            self._function = self._copied()

    def __call__(self, tensors: list[tf.Tensor]) -> object:
        if tf.inside_function() and self._compiled is not None:
            return self._compiled.emit(tensors)
        return self._function(*tensors)
