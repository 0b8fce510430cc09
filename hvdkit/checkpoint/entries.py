"""The tensors and values of a state on one rank, independent of the library that holds them.

There are three kinds of tensors:

* ``replicated``: identical on every rank; written once, by the chief;
* ``sharded``: each rank holds, writes and reads its own part of one global array;
* ``per_rank``: each rank has its own (random generator states, BatchNormalization moving statistics, accumulated
  gradients). ``StateTensor.resize`` defines how they are restored at a different number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

Kind = Literal["replicated", "sharded", "per_rank"]
Resize = Literal["keep", "mean", "sum"]
Allowed = Literal["finite", "infinite", "any"]
"""Floating-point values that a tensor may contain: finite only, also infinities, or also NaN."""
BEST_WEIGHTS = "callbacks.best_weights"
"""Name in a Supervisor's ``state`` of the weights that callbacks will restore; one mapping per callback."""


def key_of(name: str) -> str:
    """Return the key of a tensor: those of a key are restored together, or none of them.

    Example:
        >>> key_of("model/dense/kernel"), key_of("state/callbacks.best_weights/EarlyStopping/0")
        ('model', 'state/callbacks.best_weights/EarlyStopping')
    """
    parts = name.split("/")
    return "/".join(parts[:3]) if is_optional(name) else parts[0]


def is_optional(name: str) -> bool:
    """Return True for tensors that a checkpoint need not have: a run may get another callback."""
    return name.startswith(f"state/{BEST_WEIGHTS}/")


@dataclass
class StateTensor:
    """One tensor of the state, on this rank: read from a variable and written to a file, or the other way round.

    Attributes:
        name: its key, such as ``model/dense/kernel``.
        kind: how ranks hold it.
        dtype: NumPy dtype.
        shape: global shape; for a ``per_rank`` tensor, the shape on each rank. The first axis counts rows.
        read: returns this rank's part as an array. On CPUs it shares the variable's memory until the variable's next
            update, which allocates new memory.
        assign: sets this rank's part.
        index: for a sharded tensor, the global indices of this rank's part along each axis; if the rule is "flat",
            those of its elements in row-major order.
        partition: for a sharded tensor, the partition rule.
        resize: for a ``per_rank`` tensor, what each rank gets if the number of ranks has changed: its current value
            ("keep"), the mean over ranks ("mean"), or an equal part of the sum, which is preserved ("sum").
        variable: the underlying variable, if there is one.
        writes: False if another rank writes the same part.
        allowed: the floating-point values that it may contain; checked while it is written.
        rows: returns rows ``[start, stop)`` of this rank's part as a new array; None if ``read`` is as cheap.
    """

    name: str
    kind: Kind
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    assign: Callable[[np.ndarray], None]
    index: tuple[range, ...] | None = None
    partition: str | None = None
    resize: Resize = "keep"
    variable: tf.Variable | None = None
    rows: Callable[[int, int], np.ndarray] | None = None
    writes: bool = True
    allowed: Allowed = "any"

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.shape if self.index is None else tuple(map(len, self.index))

    def block(self, start: int, stop: int) -> np.ndarray:
        """Return rows ``[start, stop)`` of this rank's part as a C-contiguous array; a scalar is one row."""
        if self.rows is not None:
            return self.rows(start, stop)
        return np.ascontiguousarray(self.read()).reshape(self.part_shape or (1,))[start:stop]

    def held(self) -> StateTensor:
        """Return this tensor with its current values: an update of the variable does not change them."""
        array = np.ascontiguousarray(self.read())
        return replace(self, read=lambda: array, rows=None)


@dataclass
class Value:
    """A small value stored as JSON: one for all ranks, or one per rank.

    ``assign`` raises :class:`CorruptCheckpointError` for a value that this kind of object never has, and ValueError,
    TypeError or a similar error for one that does not fit the current object.
    """

    read: Callable[[], object]
    assign: Callable[[object], None]
    per_rank: bool = False


@dataclass
class State:
    """A flattened state. The first component of every name is its key in the mapping that was flattened.

    Attributes:
        tensors: its tensors by name.
        values: its plain values by name.
        restored: arrays and plain values that were restored, by name; all others are set in place.
    """

    tensors: dict[str, StateTensor] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    restored: dict[str, object] = field(default_factory=dict)
