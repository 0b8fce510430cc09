"""Registries of variables that are not replicated (shards, parts of sharded optimizer slots, local variables), and of
those that have their own optimizer.

States of Keras's random generators are not replicated either, and recognized by their name. All other variables are
replicated: equal on all ranks, with averaged gradients and the chief's initial values.
Optimizers, checkpoints and comparisons read the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.mesh import coordinates
from hvdkit.collectives.weak_registry import WeakRegistry
from hvdkit.sharding.partition import FLAT
from hvdkit.sharding.routing import RowsByRank

if TYPE_CHECKING:
    import keras

AnyVariable: TypeAlias = "tf.Variable | keras.Variable"
"""A variable of TensorFlow or Keras."""
_SEED_STATE = "seed_generator_state"
"""Keras's name for the state of a random generator."""


@dataclass(frozen=True)
class Piece:
    """The part of a table that a variable of this rank holds.

    Attributes:
        table: the table's name.
        shape: its global shape.
        index: the global indices that this rank holds along each axis, in local order.
        start: first row of the part in the variable.
        partition: name of the partitioning rule, for messages.
    """

    table: str
    shape: tuple[int, ...]
    index: tuple[range, ...]
    start: int
    partition: str

    @property
    def box(self) -> tuple[slice, ...]:
        """The region of the variable that holds the part. Columns beyond it are padding."""
        rows, *others = self.index
        return (slice(self.start, self.start + len(rows)), *(slice(0, len(axis)) for axis in others))


@dataclass(frozen=True)
class RowUsage:
    """The usage of each row of a table with eviction: variables ``[buckets of this rank, W]``, and the step.

    Attributes:
        ids: int64, the id that occupies the row.
        used: int64, when it was requested, -1 for never.
        fresh: bool, whether the row was assigned to a new id since the optimizer's last update.
        clock: int64 ``[2]``, equal on all ranks: the number of lookups, now and at the last update.
    """

    ids: tf.Variable
    used: tf.Variable
    fresh: tf.Variable
    clock: tf.Variable


@dataclass(frozen=True)
class Shard:
    """Contents of a sharded variable: parts of one or more tables of equal width, stacked by rows.

    Attributes:
        owner: name of the layer or variable that the tables belong to.
        pieces: the tables' parts. Rows outside of them are unused.
        slot: name of the optimizer's slot ("momentum"); None for the weights.
        usage: the usage of its rows if they can be reassigned to other ids; else None.
        axis: axis of the mesh along which ranks hold different parts; along other axes they hold the same part. None if
            every rank holds its own part.
        rows_by_rank: returns the rows that each rank read in the last lookup, for their update; None if rows are not
            read by lookups.
    """

    owner: str
    pieces: tuple[Piece, ...]
    slot: str | None = None
    axis: str | None = None
    usage: RowUsage | None = None
    rows_by_rank: Callable[[], RowsByRank | None] | None = field(default=None, compare=False, repr=False)

    def of_slot(self, slot: str) -> Shard:
        """Return the contents of a slot of this variable."""
        return replace(self, slot=slot, usage=None, rows_by_rank=None)


@dataclass(frozen=True)
class FlatShard:
    """Contents of a sharded slot of a replicated variable.

    Attributes:
        shape: global shape of the slot, equal to that of its variable.
        elements: the elements that this rank holds, in row-major order; may be empty.
    """

    shape: tuple[int, ...]
    elements: range


@dataclass(frozen=True)
class Local:
    """Contents of a local variable and its slots: values of this rank, unrelated to those of other ranks."""


Holding: TypeAlias = Shard | FlatShard | Local


class VariableOptimizer(NamedTuple):
    """The optimizer of a variable, to which ``hk.DistributedOptimizer`` delegates its updates.

    Attributes:
        optimizer: a Keras optimizer; it is copied before use.
        key: equal for equal optimizers: variables with the same key share a copy.
    """

    optimizer: keras.optimizers.Optimizer
    key: str


_HOLDINGS: WeakRegistry[Holding] = WeakRegistry()
_OPTIMIZERS: WeakRegistry[VariableOptimizer] = WeakRegistry()


def inner_variable(variable: AnyVariable) -> tf.Variable:
    """Return the TensorFlow variable inside a Keras variable, None before it is created; others unchanged."""
    return getattr(variable, "_value", variable)


def _with_inner(variable: AnyVariable) -> tuple[AnyVariable, ...]:
    """Return the variable, and the TensorFlow variable inside it if there is one."""
    inner = getattr(variable, "_value", None)
    return (variable, inner) if isinstance(inner, tf.Variable) else (variable,)


def set_holding(variable: AnyVariable, holding: Holding | None) -> None:
    """Register what a TensorFlow or Keras ``variable`` holds; None: replicated values."""
    for each in _with_inner(variable):
        if holding is None:
            _HOLDINGS.discard(each)
        else:
            _HOLDINGS.set(each, holding)


def holding_of(variable: AnyVariable) -> Holding | None:
    """Return what ``variable`` holds, or None if it is replicated."""
    return _HOLDINGS.get(variable) or _HOLDINGS.get(getattr(variable, "_value", None))


def set_variable_optimizer(variable: AnyVariable, optimizer: VariableOptimizer | None) -> None:
    """Set the optimizer of a TensorFlow or Keras ``variable``; None: keep the model's."""
    if optimizer is not None:
        for each in _with_inner(variable):
            _OPTIMIZERS.set(each, optimizer)


def variable_optimizer(variable: AnyVariable) -> VariableOptimizer | None:
    """Return the optimizer of ``variable``; None for the model's optimizer."""
    return _OPTIMIZERS.get(variable)


def shard_of(variable: AnyVariable) -> Shard | None:
    """Return the shard that ``variable`` holds, or None."""
    holding = holding_of(variable)
    return holding if isinstance(holding, Shard) else None


def flat_shard_of(variable: AnyVariable) -> FlatShard | None:
    """Return the elements that ``variable`` holds, or None if it is not a sharded slot."""
    holding = holding_of(variable)
    return holding if isinstance(holding, FlatShard) else None


def is_local(variable: AnyVariable) -> bool:
    """Return True if ``variable`` is a local variable, or a slot of one."""
    return isinstance(holding_of(variable), Local)


def differs_by_rank(variable: AnyVariable) -> bool:
    """Return True if ranks hold different values in ``variable``: a shard, a sharded slot, local values, a seed."""
    return holding_of(variable) is not None or is_seed_state(variable)


def is_seed_state(variable: AnyVariable) -> bool:
    """Return True for the state of a random generator of Keras: equal states would give equal dropout masks."""
    name = str(getattr(variable, "name", ""))  # other objects are refused later, on all ranks
    return name.partition(":")[0].rpartition("/")[2] == _SEED_STATE


def assign_whole(variable: AnyVariable, whole: tf.Tensor) -> None:
    """Set ``variable`` to ``whole``, or a sharded slot to its elements of ``whole``."""
    if (shard := flat_shard_of(variable)) is not None:
        whole = tf.reshape(whole, [-1])[shard.elements.start : shard.elements.stop]
        whole = tf.reshape(whole, variable.shape)
    variable.assign(whole)


class FlatShardState:
    """A rank's part of a sharded slot, as a ``hvdkit.checkpoint.state.ShardedState`` for checkpoints.

    Attributes:
        shape: global shape.
        dtype: the variable's dtype.
        partition: "flat": the index counts the elements in row-major order.
        local_index: this rank's elements.
    """

    partition = FLAT

    def __init__(self, variable: AnyVariable, shard: FlatShard):
        self._variable = inner_variable(variable)
        self.shape = shard.shape
        self.dtype = self._variable.dtype
        self.local_index = (shard.elements,)

    @property
    def variable(self) -> tf.Variable | None:
        """The variable if it is ``local`` itself; None if its elements have to be reshaped."""
        return self._variable if self._variable.shape.rank == 1 else None

    @property
    def local(self) -> tf.Tensor | tf.Variable:
        """This rank's elements, ``[len(local_index[0])]``."""
        variable = self.variable
        return tf.reshape(self._variable, [-1]) if variable is None else variable

    def assign_local(self, values: np.ndarray | tf.Tensor) -> None:
        """Set this rank's elements to ``values``."""
        self._variable.assign(tf.reshape(values, self._variable.shape))


def write_box(variable: tf.Variable, box: Sequence[slice], values: np.ndarray | tf.Tensor) -> None:
    """Write a part of ``variable`` in place; ``variable[box].assign`` would first read and copy it."""
    begin = [axis.start for axis in box]
    end = [axis.stop for axis in box]
    value = tf.convert_to_tensor(values, variable.dtype)
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle, begin=begin, end=end, strides=[1] * len(begin), value=value
    )


class PieceState:
    """One table's part of a variable, as a ``hvdkit.checkpoint.state.ShardedState`` for checkpoints.

    Attributes:
        table: the table's name.
        name: owner and name of the table and, for a slot, the slot's name.
        shape: global shape.
        dtype: the variable's dtype.
        partition: name of the partitioning rule.
        local_index: the global indices that this rank holds along each axis.
    """

    def __init__(self, variable: AnyVariable, shard: Shard, piece: Piece):
        self._variable = inner_variable(variable)
        self._box = piece.box
        self.table = piece.table
        self.name = "/".join(filter(None, (shard.owner, piece.table, shard.slot)))
        self.shape = piece.shape
        self.dtype = self._variable.dtype
        self.partition = piece.partition
        self.local_index = piece.index
        # Ranks along the mesh's other axes hold the same part: one of them writes it.
        self.is_writer = shard.axis is None or cluster.rank() == min(_ranks_with_same_part(shard.axis))

    @property
    def variable(self) -> tf.Variable | None:
        """The variable if it is ``local`` itself; None if it holds more than this table's part."""
        shape = tuple(len(i) for i in self.local_index)
        return self._variable if shape == tuple(self._variable.shape) else None

    @property
    def local(self) -> tf.Tensor | tf.Variable:
        """This rank's part, ``[len(i) for i in local_index]``; a copy if the variable holds more."""
        variable = self.variable
        return tf.constant(self.read_rows(0, len(self.local_index[0]))) if variable is None else variable

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows ``[start, stop)`` of this rank's part. For a variable updated by rows, this copies the least."""
        first, *columns = self._box
        rows = self._variable.sparse_read(tf.range(first.start + start, first.start + stop))
        return np.ascontiguousarray(rows.numpy()[(slice(None), *columns)])

    def assign_local(self, values: np.ndarray | tf.Tensor) -> None:
        """Set this rank's part to ``values``."""
        if self.variable is not None:
            self._variable.assign(values)
        else:
            write_box(self._variable, self._box, values)


def _ranks_with_same_part(axis: str) -> list[int]:
    """Return the ranks that hold the same part as this rank if tables are sharded along ``axis``."""
    mesh = cluster.cluster().mesh
    local = cluster.group(axis).index
    return [rank for rank in range(cluster.size()) if coordinates(rank, mesh).get(axis, 0) == local]


def piece_states(variable: AnyVariable) -> list[PieceState]:
    """Return the tables' parts of a sharded variable; empty for other variables."""
    shard = shard_of(variable)
    return [] if shard is None else [PieceState(variable, shard, piece) for piece in shard.pieces]
