"""The variables of a layer's tables on one rank: create, gather and assign them, and give lookups access to rows."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.call_checks import Call, agree_on_call, attempt
from hvdkit.errors import describe
from hvdkit.layers.axis_collectives import sum_parts
from hvdkit.layers.features import OutOfRange, lookups_of
from hvdkit.layers.sharded_layer import memory_device
from hvdkit.layers.vocabulary_variables import VocabularyVariables
from hvdkit.sharding.initial import common_seed, initial_blocks
from hvdkit.sharding.last_lookup import LastLookup
from hvdkit.sharding.layout import TableGroup, lay_out
from hvdkit.sharding.partitioned_variable import gather_parts
from hvdkit.sharding.routing import KeyedVariable, RowSource
from hvdkit.sharding.shards import Piece, PieceState, Shard, piece_states, set_holding, shard_of, write_box
from hvdkit.sharding.table import Table
from hvdkit.sharding.variable_optimizer import VariableOptimizer, set_variable_optimizer, variable_optimizer


class TableStore:
    """The tables of a layer, sharded across ranks according to a layout.

    Args:
        layer: the Keras layer that owns the variables.
        tables: the tables.
        placements: the placement of each table.
        seed: seed of random initial values, or None.
        out_of_range: how to handle ids out of range.
        wire: dtype in which rows are sent, or None.
        floats: whether ids may be floats.

    Attributes:
        tables: the tables by name.
        lookups: the feature and the table of each output.

    Raises:
        CollectiveMismatchError: ranks have different tables or placements.
    """

    def __init__(
        self,
        layer: Any,
        tables: Sequence[Table],
        placements: Mapping[str, str],
        *,
        seed: int | None,
        out_of_range: OutOfRange,
        wire: tf.DType | None,
        floats: bool,
    ):
        self.tables = {table.name: table for table in tables}
        self.lookups = lookups_of(tables)
        self.out_of_range, self.wire, self.floats = out_of_range, wire, floats
        listed = [
            (t.name, t.input_dim, t.output_dim, t.dtype, t.evict or "", placements[t.name], t.optimizer_key)
            for t in tables
        ]
        call = Call(f"tables {listed}")

        def draw() -> None:
            call.payload = common_seed(seed)

        call.problem = attempt(draw)
        self._seed = agree_on_call(call)[0].payload
        self.layout = lay_out(tables, placements, cluster.size())
        with tf.init_scope():
            groups = enumerate(self.layout.groups)
            self.variables = [self._create_group(layer, number, group) for number, group in groups]
            self.replicated = {table.name: self._create_replicated(layer, table) for table in self.layout.replicated}
            self._vocabularies = {
                number: VocabularyVariables(layer, group.evicts, self.variables[number], self._seed)
                for number, group in enumerate(self.layout.groups)
                if group.evicts is not None
            }

    def _create_group(self, layer: Any, number: int, group: TableGroup) -> Any:
        rank = cluster.rank()
        pieces = []
        for part in group.parts_on(rank):
            table_shape = (part.table.input_dim, part.table.output_dim)
            rule = next(s.rule for s in group.slices if s.table is part.table)
            pieces.append(Piece(part.table.name, table_shape, (part.rows, part.columns), part.base, rule))
        name, shape, zeros = f"embeddings_{number}", (group.rows[rank], group.width), group.evicts is not None
        variable = self._add_weight(layer, name, shape, group.dtype, pieces, host=group.host, zeros=zeros)
        set_holding(variable, Shard(variable.path.rpartition("/")[0], tuple(pieces), lookup=LastLookup()))
        set_variable_optimizer(variable, _optimizer_of(group.slices[0].table))
        return variable

    def _create_replicated(self, layer: Any, table: Table) -> Any:
        shape = (table.input_dim, table.output_dim)
        whole = Piece(table.name, shape, tuple(map(range, shape)), 0, "")
        variable = self._add_weight(
            layer, table.name, shape, table.dtype, [whole], host=table.host, regularizer=table.regularizer
        )
        set_variable_optimizer(variable, _optimizer_of(table))
        return variable

    def _add_weight(
        self,
        layer: Any,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        pieces: Sequence[Piece],
        *,
        host: bool,
        zeros: bool = False,
        regularizer: Any = None,
    ) -> Any:
        def write(values: Any) -> None:
            for piece in () if zeros else pieces:
                mixed = np.random.SeedSequence([self._seed, zlib.crc32(piece.table.encode())])
                seed = int(mixed.generate_state(1, np.uint64)[0])
                initializer, (_, columns) = self.tables[piece.table].initializer, piece.box
                for start, block in initial_blocks(initializer, piece.shape, dtype, seed, piece.index):
                    first = piece.start + start
                    values(slice(first, first + len(block)), columns, block)

        is_creating = True

        def initial_values(shape: Sequence[int], dtype: str) -> Any:
            if is_creating:
                return tf.zeros(shape, dtype)
            values = np.zeros(shape, tf.as_dtype(dtype).as_numpy_dtype)
            write(lambda rows, columns, block: values.__setitem__((rows, columns), block))
            return values

        with memory_device(host):
            weight = layer.add_weight(
                name=name,
                shape=shape,
                initializer=initial_values,
                dtype=dtype,
                autocast=False,
                regularizer=regularizer,
            )
        is_creating = False  # while inferring shapes, Keras defers creating the variable
        if weight._value is not None:
            # Write in place, one block at a time, to avoid a second copy in memory.
            write(lambda rows, columns, block: write_box(weight._value, (rows, columns), block))
        return weight

    @property
    def deferred(self) -> bool:
        """Whether Keras is inferring shapes, and has not created the variables yet."""
        return any(v._value is None for v in (*self.variables, *self.replicated.values()))

    def sources(self, groups: Sequence[int], training: bool | None) -> list[RowSource]:
        """Return the sources of rows for some groups; ``training`` as for a lookup."""
        for variable in self.variables:  # Keras may have created the TensorFlow variable in the meantime
            set_holding(variable, shard_of(variable))
            set_variable_optimizer(variable, variable_optimizer(variable))
        return [self._source(group, training) for group in groups]

    def _source(self, group: int, training: bool | None) -> RowSource:
        if group in self._vocabularies:
            return self._vocabularies[group].source(training)
        variable = self.variables[group]
        shard = shard_of(variable)
        assert shard is not None
        return KeyedVariable(variable._value, shard.lookup)

    def gather(self, name: str, root: int | None) -> np.ndarray | None:
        """Return an entire table on every rank, or only on ``root`` and None elsewhere. Every rank calls it."""
        size = cluster.size()

        def check() -> None:
            self._table(name)
            if root is not None and root not in range(size):
                raise ValueError(describe("root", root, f"a rank, 0 to {size - 1}, or None", "pass one"))

        agree_on_call(Call(f"gather({name!r}, root={root})", problem=attempt(check)))
        table = self._table(name)
        if name in self.replicated:
            return self.replicated[name].numpy() if root in (None, cluster.rank()) else None
        state = self._state(name)
        parts = [part for rank in range(size) for group in self.layout.groups for part in group.parts_on(rank)]
        shape = (table.input_dim, table.output_dim)
        indices = [(part.rows, part.columns) for part in parts if part.table.name == name]
        return gather_parts(state.local, indices, shape, root, "hvdkit.gather")

    def ids(self, name: str) -> np.ndarray:
        """Return the id of each row of a table with eviction, on every rank. Every rank calls it."""
        vocabularies = [vocabulary for vocabulary in self._vocabularies.values() if vocabulary.table.name == name]

        def check() -> None:
            self._table(name)
            if not vocabularies:
                remedy = "ids of others are their rows"
                raise ValueError(describe("table", repr(name), "one made with evict=", remedy))

        agree_on_call(Call(f"ids({name!r})", problem=attempt(check)))
        return vocabularies[0].gather_ids()

    def assign(self, name: str, full_array: npt.ArrayLike) -> None:
        """Set an entire table; each rank takes its part of ``full_array``."""
        array = self.check_whole(name, full_array)
        if name in self.replicated:
            self.replicated[name].assign(array)
            return
        state = self._state(name)
        box = tuple(slice(i.start, i.stop, i.step) for i in state.local_index)
        state.assign_local(tf.cast(array[box], state.dtype))

    def check_whole(self, name: str, full_array: npt.ArrayLike) -> np.ndarray:
        """Return ``full_array`` as an array. Raises ValueError if the table does not exist or has another shape."""
        table, array = self._table(name), np.asarray(full_array)
        if array.shape != (table.input_dim, table.output_dim):
            expected = f"[{table.input_dim}, {table.output_dim}]"
            got = f"shape {list(array.shape)} for table {name!r}"
            raise ValueError(describe("full_array", got, expected, "pass the whole table"))
        return array

    def penalty(self) -> tf.Tensor | None:
        """Return the summed penalty of sharded tables with a regularizer; None without any. Every rank calls it.

        Each rank computes the penalty of its parts; the sum and its gradient are the same on every rank.
        """
        regularized = [self.tables[name] for name in self.layout.slices if self.tables[name].regularizer is not None]
        if not regularized or self.deferred:
            return None
        dtype = tf.float64 if any(table.dtype == "float64" for table in regularized) else tf.float32
        penalties = [tf.zeros([], dtype)]
        for variable in self.variables:
            shard = shard_of(variable)
            for piece in () if shard is None else shard.pieces:
                if (regularizer := self.tables[piece.table].regularizer) is not None:
                    rows = tf.convert_to_tensor(variable._value)[piece.box]
                    penalties.append(tf.cast(regularizer(tf.cast(rows, dtype)), dtype))
        return sum_parts(tf.add_n(penalties))

    def _table(self, name: str) -> Table:
        if name not in self.tables:
            raise ValueError(describe("table", repr(name), f"one of {list(self.tables)}", "check its name"))
        return self.tables[name]

    def _state(self, name: str) -> PieceState:
        """Return this rank's part of a sharded table."""
        states = (state for variable in self.variables for state in piece_states(variable))
        return next(state for state in states if state.table == name)


def _optimizer_of(table: Table) -> VariableOptimizer | None:
    return None if table.optimizer is None else VariableOptimizer(table.optimizer, table.optimizer_key)
