"""The variables of a layer's tables on one rank: create, gather and assign them, and give lookups access to rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.call_checks import exchange_payloads
from hvdkit.errors import describe
from hvdkit.layers.axis_collectives import sum_parts
from hvdkit.layers.features import OutOfRange, lookups_of
from hvdkit.layers.sharded_layer import memory_device
from hvdkit.layers.vocabulary_variables import VocabularyVariables
from hvdkit.sharding.initial import common_seed, draws_numbers, initial_blocks
from hvdkit.sharding.layout import TableGroup, lay_out
from hvdkit.sharding.partitioned_variable import gather_parts
from hvdkit.sharding.routing import KeptLookup, KeyedVariable, RowSource, reads_own_rows, rows_of_last_lookup
from hvdkit.sharding.shards import (
    Piece,
    PieceState,
    Shard,
    VariableOptimizer,
    piece_states,
    set_holding,
    set_variable_optimizer,
    shard_of,
    variable_optimizer,
    write_box,
)
from hvdkit.sharding.table import Table


class TableStore:
    """The tables of a layer, sharded across ranks according to a layout.

    Args:
        layer: the layer.
        tables: its tables.
        placements: the placement of each table, by name.
        seed, out_of_range: as for :class:`hvdkit.layers.collection.ShardedEmbeddingCollection`.
        wire: the dtype in which rows are sent; None for that of the table.
        floats: whether ids may be floats.

    Attributes:
        layer_name: for messages.
        tables: the tables by name.
        lookups: the feature and the table of each output.
        outputs: the names of each table's outputs.
        last_lookup: the last lookup of rows, for their update; None before the first one.

    Raises:
        CollectiveMismatchError: ranks have different tables or placements.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        tables: Sequence[Table],
        placements: Mapping[str, str],
        *,
        seed: int | None,
        out_of_range: OutOfRange,
        wire: tf.DType | None,
        floats: bool,
    ):
        self.layer_name = layer.name
        self.tables = {table.name: table for table in tables}
        self.lookups = lookups_of(tables)
        self.outputs: dict[str, list[str]] = {}
        for output, (_, table) in self.lookups.items():
            self.outputs.setdefault(table.name, []).append(output)
        self.out_of_range = out_of_range
        self.wire = wire
        self.floats = floats
        self.last_lookup: KeptLookup | None = None
        listed = [
            (t.name, t.input_dim, t.output_dim, t.dtype, t.evict or "", placements[t.name], t.optimizer_key)
            for t in tables
        ]
        # As in Keras, a table of constants does not change the seeds of later layers.
        is_random = any(draws_numbers(table.initializer) for table in tables)
        self._seed = exchange_payloads(f"tables {listed}", lambda: common_seed(seed if is_random else seed or 0))[0]
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
        self._is_registered = not self.deferred

    def _create_group(self, layer: keras.layers.Layer, number: int, group: TableGroup) -> keras.Variable:
        rank = cluster.rank()
        pieces = []
        for part, rows in group.parts_on(rank):
            table_shape = (part.table.input_dim, part.table.output_dim)
            pieces.append(Piece(part.table.name, table_shape, (rows, part.columns), part.base, part.rule))
        name = f"embeddings_{number}"
        shape = (group.rows[rank], group.width)
        initialized = pieces if group.evicts is None else ()
        variable = self._add_weight(layer, name, shape, group.slices[0].table, initialized)
        owner = variable.path.rpartition("/")[0]
        set_holding(variable, Shard(owner, tuple(pieces), rows_by_rank=rows_of_last_lookup(self, number)))
        return variable

    def _create_replicated(self, layer: keras.layers.Layer, table: Table) -> keras.Variable:
        shape = (table.input_dim, table.output_dim)
        whole = Piece(table.name, shape, tuple(map(range, shape)), 0, "")
        return self._add_weight(layer, table.name, shape, table, [whole], table.regularizer)

    def _add_weight(
        self,
        layer: keras.layers.Layer,
        name: str,
        shape: tuple[int, ...],
        table: Table,
        pieces: Sequence[Piece],
        regularizer: keras.regularizers.Regularizer | None = None,
    ) -> keras.Variable:
        """Add a variable for tables like ``table``, with the initial values of ``pieces`` and zeros elsewhere."""

        def blocks() -> Iterator[tuple[tuple[slice, slice], np.ndarray]]:
            for piece in pieces:
                mixed = np.random.SeedSequence([self._seed, zlib.crc32(piece.table.encode())])
                seed = int(mixed.generate_state(1, np.uint64)[0])
                initializer = self.tables[piece.table].initializer
                _, columns = piece.box
                for start, block in initial_blocks(initializer, piece.shape, table.dtype, seed, piece.index):
                    first = piece.start + start
                    yield (slice(first, first + len(block)), columns), block

        is_creating = True

        def initial_values(shape: Sequence[int], dtype: str) -> tf.Tensor | np.ndarray:
            if is_creating:
                return tf.zeros(shape, dtype)
            values = np.zeros(shape, tf.as_dtype(dtype).as_numpy_dtype)
            for box, block in blocks():
                values[box] = block
            return values

        with memory_device(table.host):
            weight = layer.add_weight(
                name=name,
                shape=shape,
                initializer=initial_values,
                dtype=table.dtype,
                autocast=False,
                regularizer=regularizer,
            )
        is_creating = False  # while inferring shapes, Keras defers creating the variable
        if weight._value is not None:
            for box, block in blocks():  # in place, one block at a time, to avoid a second copy in memory
                write_box(weight._value, box, block)
        if table.optimizer is not None:
            set_variable_optimizer(weight, VariableOptimizer(table.optimizer, table.optimizer_key))
        return weight

    @property
    def deferred(self) -> bool:
        """Whether Keras is inferring shapes, and has not created the variables yet."""
        return any(v._value is None for v in (*self.variables, *self.replicated.values()))

    def register_created(self) -> None:
        """Register the TensorFlow variables that Keras has created after it inferred shapes."""
        if self._is_registered or self.deferred:
            return
        self._is_registered = True
        for variable in self.variables:
            set_holding(variable, shard_of(variable))
            set_variable_optimizer(variable, variable_optimizer(variable))
        for vocabulary in self._vocabularies.values():
            vocabulary.register_shards()

    def sources(self, training: bool | None) -> list[RowSource]:
        """Return the source of each variable's rows; ``training`` as for a lookup."""
        return [
            KeyedVariable(variable._value)
            if (vocabulary := self._vocabularies.get(number)) is None
            else vocabulary.source(training if variable.trainable else False)
            for number, variable in enumerate(self.variables)
        ]

    def gather(self, name: str, root: int | None) -> np.ndarray | None:
        """Return an entire table on every rank, or only on ``root`` and None elsewhere. Every rank calls it."""
        size = cluster.size()

        def check() -> None:
            self._table(name)
            if root is not None and root not in range(size):
                raise ValueError(describe("root", root, f"a rank, 0 to {size - 1}, or None", "pass one"))

        exchange_payloads(f"gather({name!r}, root={root})", check)
        table = self._table(name)
        if name in self.replicated:
            return self.replicated[name].numpy() if root in (None, cluster.rank()) else None
        state = self._state(name)
        parts = [part for rank in range(size) for group in self.layout.groups for part in group.parts_on(rank)]
        shape = (table.input_dim, table.output_dim)
        indices = [(rows, part.columns) for part, rows in parts if part.table.name == name]
        return gather_parts(state.local, indices, shape, root, "hvdkit.gather")

    def ids(self, name: str) -> np.ndarray:
        """Return the id of each row of a table with eviction, on every rank. Every rank calls it."""
        vocabularies = [vocabulary for vocabulary in self._vocabularies.values() if vocabulary.table.name == name]

        def check() -> None:
            self._table(name)
            if not vocabularies:
                remedy = "ids of others are their rows"
                raise ValueError(describe("table", repr(name), "one created with evict=", remedy))

        exchange_payloads(f"ids({name!r})", check)
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
        table = self._table(name)
        array = np.asarray(full_array)
        if array.shape != (table.input_dim, table.output_dim):
            expected = f"[{table.input_dim}, {table.output_dim}]"
            got = f"shape {list(array.shape)} for table {name!r}"
            raise ValueError(describe("full_array", got, expected, "pass the whole table"))
        return array

    def penalty(self) -> tf.Tensor | None:
        """Return the summed penalty of sharded tables with a regularizer; None without any. Every rank calls it.

        Each rank computes the penalty of its parts; the sum and its gradient are the same on every rank.
        """
        sharded = [table for name, table in self.tables.items() if name not in self.replicated]
        regularized = [table for table in sharded if table.regularizer is not None]
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
        total = tf.add_n(penalties)
        return total if reads_own_rows() else sum_parts(total)

    def _table(self, name: str) -> Table:
        if name not in self.tables:
            raise ValueError(describe("table", repr(name), f"one of {list(self.tables)}", "check its name"))
        return self.tables[name]

    def _state(self, name: str) -> PieceState:
        """Return this rank's part of a sharded table."""
        states = (state for variable in self.variables for state in piece_states(variable))
        return next(state for state in states if state.table == name)
