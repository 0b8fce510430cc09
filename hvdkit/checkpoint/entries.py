"""The tensors and values of a state on one rank, whatever library holds them.

Three kinds of tensors, by how ranks hold them:

* ``replicated``: the same on every rank, written once, by the chief;
* ``sharded``: each rank holds, writes and reads its own part of one global array;
* ``per_rank``: each rank has one of its own (states of random generators, moving statistics of BatchNormalization,
  gradients added up so far). At another number of ranks a rule says what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hvdkit.checkpoint.tensorfile import Allowed

Kind = Literal["replicated", "sharded", "per_rank"]
Resize = Literal["keep", "mean", "share"]


@dataclass
class Entry:
    """One tensor of the state, on this rank.

    Attributes:
        name: its key, such as ``model/dense/kernel``.
        kind: how ranks hold it.
        dtype: NumPy dtype.
        shape: global shape; of a ``per_rank`` tensor, that of each rank's.
        read: gives this rank's part as an array. On CPUs it shares the variable's memory until the variable's next
            update, which then takes new memory.
        assign: takes this rank's part.
        index: of a sharded tensor, the global indices of this rank's part along each axis; where the rule is "flat",
            those of its elements in row-major order.
        partition: of a sharded tensor, its rule.
        resize: of a ``per_rank`` tensor, what each rank takes when the number of ranks is another: what it has
            ("keep"), the ranks' mean ("mean"), or an equal share of their sum ("share").
        variable: the variable behind it, if there is one.
        writes: False where another rank writes the same part.
        allowed: the floating-point values that it may be saved with.
        rows: gives rows ``[start, stop)`` of this rank's part as an array of its own; None where ``read`` is as cheap.
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
    variable: Any = None
    rows: Callable[[int, int], np.ndarray] | None = None
    writes: bool = True
    allowed: Allowed = "any"


@dataclass
class Value:
    """A small value that goes into the manifest as JSON: one for all ranks, or one for each."""

    read: Callable[[], Any]
    assign: Callable[[Any], None]
    per_rank: bool = False


@dataclass
class State:
    """A state laid out flat; the first part of every name is its key in the given mapping."""

    entries: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)  # arrays and values that a restore brought
