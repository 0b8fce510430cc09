"""Which variables are not replicated, and what they hold: a shard, a run of a divided slot, or a rank's local values.

Everything else takes a variable for replicated: equal on all ranks, its gradients averaged, its first values the
chief's. What a variable holds is kept in one registry, which optimizers, checkpoints and comparisons read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.mesh import coordinates
from hvdkit.collectives.runs import LastLookup
from hvdkit.marks import WeakRegistry
from hvdkit.partition import FLAT


@dataclass(frozen=True)
class Piece:
    """What one table has in a variable of this rank.

    Attributes:
        table: the table's name.
        shape: its global shape.
        index: along each axis the global indices that this rank holds, in its order.
        start: the variable's first row that belongs to it.
        partition: the rule's name, for people.
    """

    table: str
    shape: tuple[int, ...]
    index: tuple[range, ...]
    start: int
    partition: str

    @property
    def box(self) -> tuple[slice, ...]:
        """Where in the variable the table's part stands; columns beyond it fill rows up."""
        rows, *others = self.index
        return (slice(self.start, self.start + len(rows)), *(slice(0, len(axis)) for axis in others))


@dataclass(frozen=True)
class Shard:
    """What a variable holds: parts of one or more tables of equal width, one below the other.

    Attributes:
        owner: name of the layer or variable that the tables belong to.
        pieces: the tables' parts; rows in none of them are unused.
        slot: of an optimizer's slot, its name ("momentum"); None for the weights themselves.
        uses: of rows that change hands, a ``hvdkit.variable.vocabulary.Uses``; else None.
        axis: of the mesh, along which ranks hold different parts, and along the others the same ones; None where every
            rank has a part of its own.
        lookup: the last lookup of its rows across ranks, for their update; None if they are read in another way.
    """

    owner: str
    pieces: tuple[Piece, ...]
    slot: str | None = None
    axis: str | None = None
    uses: Any = None
    lookup: LastLookup | None = field(default=None, compare=False, repr=False)

    def of_slot(self, slot: str) -> Shard:
        """Return what a slot of this variable holds."""
        return replace(self, slot=slot, uses=None, lookup=None)


@dataclass(frozen=True)
class Run:
    """What a slot of a replicated variable holds where ranks divide such slots among them.

    Attributes:
        shape: of the whole slot, global; that of its variable.
        elements: which of its elements, in row-major order, this rank holds; maybe none.
    """

    shape: tuple[int, ...]
    elements: range


@dataclass(frozen=True)
class Local:
    """What a local variable holds, and each of its slots: values of this rank, related to those of no other rank."""


Holding: TypeAlias = Shard | Run | Local

_HOLDINGS: WeakRegistry[Holding] = WeakRegistry()


def mark(variable: Any, holding: Holding | None) -> None:
    """Note what ``variable``, TensorFlow's or Keras's, holds; None: the values that all ranks have."""
    inner = getattr(variable, "_value", None)
    for each in (variable, inner) if isinstance(inner, tf.Variable) else (variable,):
        if holding is None:
            _HOLDINGS.discard(each)
        else:
            _HOLDINGS.set(each, holding)


def holding_of(variable: Any) -> Holding | None:
    """Return what ``variable`` holds, or None for a replicated one."""
    return _HOLDINGS.get(variable) or _HOLDINGS.get(getattr(variable, "_value", None))


def shard_of(variable: Any) -> Shard | None:
    """Return the shard that ``variable`` holds, or None."""
    holding = holding_of(variable)
    return holding if isinstance(holding, Shard) else None


def run_of(variable: Any) -> Run | None:
    """Return which elements ``variable`` holds, or None if it is not part of a divided slot."""
    holding = holding_of(variable)
    return holding if isinstance(holding, Run) else None


def is_local(variable: Any) -> bool:
    """Return True if ``variable`` is a local variable, or a slot of one."""
    return isinstance(holding_of(variable), Local)


def is_part(variable: Any) -> bool:
    """Return True if ranks hold different values in ``variable``: a shard, a run of a divided slot, or local values."""
    return holding_of(variable) is not None


def assign_whole(variable: Any, whole: Any) -> None:
    """Set ``variable`` to ``whole``; one that holds a run of it, to that run."""
    if (run := run_of(variable)) is not None:
        whole = tf.reshape(whole, [-1])[run.elements.start : run.elements.stop]
        whole = tf.reshape(whole, variable.shape)
    variable.assign(whole)


class RunState:
    """A rank's part of a divided slot as a checkpoint sees it: a ``hvdkit.checkpoint.state.ShardedState``.

    Attributes:
        shape: global shape.
        dtype: the variable's.
        partition: "flat": the index counts the elements in row-major order.
        local_index: this rank's elements.
    """

    partition = FLAT

    def __init__(self, variable: Any, run: Run):
        self._variable = getattr(variable, "_value", variable)
        self.shape, self.dtype, self.local_index = run.shape, self._variable.dtype, (run.elements,)

    @property
    def local(self) -> Any:
        """This rank's elements, ``[len(local_index[0])]``."""
        return self._variable if self._variable.shape.rank == 1 else tf.reshape(self._variable, [-1])

    def assign_local(self, values: Any) -> None:
        """Take ``values`` as this rank's elements."""
        self._variable.assign(tf.reshape(values, self._variable.shape))


def write_box(variable: tf.Variable, box: Sequence[slice], values: Any) -> None:
    """Write a part of ``variable`` where it stands: ``variable[box].assign`` would read it first, and then copy it."""
    begin, end = [axis.start for axis in box], [axis.stop for axis in box]
    value = tf.convert_to_tensor(values, variable.dtype)
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle, begin=begin, end=end, strides=[1] * len(begin), value=value
    )


class PieceState:
    """One table's part of a variable as a checkpoint sees it: a ``hvdkit.checkpoint.state.ShardedState``.

    Attributes:
        name: of the table, with its owner and, for a slot, the slot's name.
        shape: global shape.
        dtype: the variable's.
        partition: the rule's name.
        local_index: along each axis the global indices that this rank holds.
    """

    def __init__(self, variable: Any, shard: Shard, piece: Piece):
        self._variable = getattr(variable, "_value", variable)
        self._box = piece.box
        words = (shard.owner, piece.table, shard.slot)
        self.name = "/".join(word for word in words if word)
        self.shape, self.dtype, self.partition = piece.shape, self._variable.dtype, piece.partition
        self.local_index = piece.index
        # Along the mesh's other axes ranks hold the same part.
        self.is_writer = shard.axis is None or cluster.rank() == min(_holders(shard.axis))

    @property
    def local(self) -> Any:
        """This rank's part, ``[len(i) for i in local_index]``."""
        if self._is_whole():
            return self._variable
        return tf.constant(self.read_rows(0, len(self.local_index[0])))

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows ``[start, stop)`` of this rank's part; of a variable updated by rows no other way copies less."""
        first, *columns = self._box
        rows = self._variable.sparse_read(tf.range(first.start + start, first.start + stop))
        return np.ascontiguousarray(rows.numpy()[(slice(None), *columns)])

    def assign_local(self, values: Any) -> None:
        """Take ``values`` as this rank's part."""
        if self._is_whole():
            self._variable.assign(values)
        else:
            write_box(self._variable, self._box, values)

    def _is_whole(self) -> bool:
        return tuple(len(i) for i in self.local_index) == tuple(self._variable.shape)


def _holders(axis: str) -> list[int]:
    """Return the ranks that hold the same part of what is cut along ``axis``."""
    mesh, mine = cluster.cluster().mesh, cluster.group(axis).index
    return [rank for rank in range(cluster.size()) if coordinates(rank, mesh).get(axis, 0) == mine]


def piece_states(variable: Any) -> list[PieceState]:
    """Return the tables' parts of a variable that is a shard."""
    shard = shard_of(variable)
    return [] if shard is None else [PieceState(variable, shard, piece) for piece in shard.pieces]
