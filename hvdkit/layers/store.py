"""The variables of a set of tables on one rank, and the lookup of any number of features in them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives import tensors
from hvdkit.collectives.agreement import Call, agree, attempt
from hvdkit.collectives.shards import Piece, PieceState, Shard, mark, shard_of
from hvdkit.errors import describe
from hvdkit.layers.base import memory
from hvdkit.layers.changing import ChangingRows
from hvdkit.layers.features import Bag, OutOfRange, combined, in_range
from hvdkit.planning import Group, Table, lay_out
from hvdkit.variable.faults import find_fault, raise_everywhere
from hvdkit.variable.initial import common_seed, initial_blocks
from hvdkit.variable.keys import key_dtype, keys_of
from hvdkit.variable.partitioned import gather_parts
from hvdkit.variable.routing import Found, Numbered, Source, look_up, read_distinct


class TableStore:
    """Tables of a layer, cut across ranks as a layout says.

    Args:
        layer: the Keras layer that owns the variables.
        tables: the tables.
        placements: where each goes.
        seed: of random first values, or None.
        out_of_range: what becomes of ids that are no rows.
        wire: dtype in which rows travel, or None.

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
    ):
        self.tables = {table.name: table for table in tables}
        self.out_of_range, self._wire = out_of_range, wire
        listed = [(t.name, t.input_dim, t.output_dim, t.dtype, t.evict or "", placements[t.name]) for t in tables]
        call = Call(f"tables {listed}")

        def draw() -> None:
            call.payload = common_seed(seed)

        call.problem = attempt(draw)
        self._seed = agree(call)[0].payload
        self.layout = lay_out(tables, placements, cluster.size())
        with tf.init_scope():
            self.variables = [self._make(layer, number, group) for number, group in enumerate(self.layout.groups)]
            self.replicated = {table.name: self._make_whole(layer, table) for table in self.layout.replicated}
            self._changing = {
                number: ChangingRows(layer, group.evicts, self.variables[number], self._seed)
                for number, group in enumerate(self.layout.groups)
                if group.evicts is not None
            }

    def _make(self, layer: Any, number: int, group: Group) -> Any:
        rank = cluster.rank()
        pieces = []
        for held in group.held(rank):
            whole = (held.table.input_dim, held.table.output_dim)
            rule = next(s.rule for s in group.slices if s.table is held.table)
            pieces.append(Piece(held.table.name, whole, (held.rows, held.columns), held.base, rule))
        shape = (group.rows[rank], group.width)
        variable = self._add(
            layer, f"embeddings_{number}", shape, group.dtype, pieces, host=group.host, zeros=group.evicts is not None
        )
        mark(variable, Shard(variable.path.rpartition("/")[0], tuple(pieces)))
        return variable

    def _make_whole(self, layer: Any, table: Table) -> Any:
        shape = (table.input_dim, table.output_dim)
        whole = Piece(table.name, shape, tuple(map(range, shape)), 0, "")
        return self._add(layer, table.name, shape, table.dtype, [whole], host=table.host)

    def _add(
        self,
        layer: Any,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        pieces: Sequence[Piece],
        *,
        host: bool,
        zeros: bool = False,
    ) -> Any:
        def first_values(shape: Sequence[int], dtype: str) -> np.ndarray:
            values = np.zeros(shape, tf.as_dtype(dtype).as_numpy_dtype)
            for piece in () if zeros else pieces:
                mixed = np.random.SeedSequence([self._seed, zlib.crc32(piece.table.encode())])
                seed = int(mixed.generate_state(1, np.uint64)[0])
                initializer, (_, columns) = self.tables[piece.table].initializer, piece.box
                for start, block in initial_blocks(initializer, piece.shape, dtype, seed, piece.index):
                    first = piece.start + start
                    values[first : first + len(block), columns] = block
            return values

        with memory(host):
            return layer.add_weight(name=name, shape=shape, initializer=first_values, dtype=dtype, autocast=False)

    def look_up(self, bags: Mapping[str, tuple[Table, Bag]], *, training: bool | None) -> dict[str, Any]:
        """Return each feature's output. Every rank calls it, with the same features.

        Args:
            bags: of each feature its table and its ids.
            training: whether new ids of tables that evict get rows; see :class:`hvdkit.variable.vocabulary.Vocabulary`.

        Returns:
            Of each feature ``[*shape, output_dim]``, in the table's dtype.

        Raises:
            ValueError: in eager mode, on every rank, where an id of any rank is out of range and that is an error;
                ``tf.errors.InvalidArgumentError`` in graphs.
        """
        for variable in self.variables:
            mark(variable, shard_of(variable))  # Keras may have made the TensorFlow variable since
        given = [(n, b) for n, b in bags.items() if self.out_of_range == "error" and not b[0].evict]
        labels = [f"feature {name!r} of table {table.name!r}" for name, (table, _) in given]
        if given:
            fault = find_fault([b.ids for _, (_, b) in given], labels, [t.input_dim for _, (t, _) in given])
        else:
            fault = find_fault([tf.zeros([0], tf.int32)], ["none"], [1])
        safe = {n: (t, b if t.evict else in_range(b, t.input_dim, self.out_of_range)) for n, (t, b) in bags.items()}
        deferred = any(v._value is None for v in (*self.variables, *self.replicated.values()))
        slices = {} if deferred else self._look_up_slices(safe, fault, training)
        outputs = {}
        for name, (table, bag) in safe.items():
            if deferred:  # Keras infers shapes, and has not made the variables yet
                parts = [Found(tf.zeros([1, table.output_dim], table.dtype), tf.zeros_like(bag.ids))]
            elif table.name in self.replicated:
                parts = [self._read_whole(table, bag)]
            else:
                parts = slices[name]
            made = [combined(found, bag, table.combiner) for found in parts]
            outputs[name] = made[0] if len(made) == 1 else _beside(made, table.output_dim)
        return outputs

    def _read_whole(self, table: Table, bag: Bag) -> Found:
        return read_distinct(Numbered(self.replicated[table.name]._value), bag.ids)

    def _look_up_slices(
        self, bags: Mapping[str, tuple[Table, Bag]], fault: Any, training: bool | None
    ) -> dict[str, list[Found]]:
        """Look all sharded features up at once; return each feature's rows, one part for each run of columns."""
        size = self.layout.size
        asked: list[list[tuple[str, int, tf.Tensor]]] = [[] for _ in self.layout.groups]
        dtype = key_dtype(self.layout.keys)  # one for all, which travel in one message
        for name, (table, bag) in bags.items():
            for number, (group, part) in enumerate(self.layout.slices.get(table.name, ())):
                ids = tf.cast(bag.ids, dtype)
                if not table.evict:
                    ids = keys_of(ids, part.rule, table.input_dim, size, base=part.base, rank=part.rank)
                asked[group].append((name, number, ids))
        used = [g for g, wanted in enumerate(asked) if wanted]
        if not used:  # all tables are replicated: an id out of range is an error on all ranks even so
            words = fault.words[None]
            if size > 1 and self.out_of_range == "error":
                words = tensors.allgather(words, "hvdkit.lookup.faults")
            with tf.control_dependencies(raise_everywhere(words, fault)):
                return {name: [] for name in bags}
        keys = [tf.concat([k for _, _, k in asked[g]], 0) if len(asked[g]) > 1 else asked[g][0][2] for g in used]
        sources: list[Source] = [
            self._changing[g].source(training) if g in self._changing else Numbered(self.variables[g]._value)
            for g in used
        ]
        found = look_up(sources, keys, fault, name="hvdkit.lookup", wire=self._wire)
        results: dict[str, dict[int, Found]] = {name: {} for name in bags}
        for g, rows in zip(used, found, strict=True):
            for (name, number, _), own in zip(asked[g], _split(rows, [k for _, _, k in asked[g]]), strict=True):
                results[name][number] = own
        return {name: [parts[i] for i in sorted(parts)] for name, parts in results.items()}

    def gather(self, name: str, root: int | None) -> np.ndarray | None:
        """Return a whole table, on every rank or on ``root`` alone and None elsewhere. Every rank calls it."""
        table, size = self._table(name), cluster.size()
        if root is not None and root not in range(size):
            raise ValueError(describe("root", root, f"a rank, 0 to {size - 1}, or None", "pass one"))
        agree(Call(f"gather({name!r}, root={root})"))
        if name in self.replicated:
            return self.replicated[name].numpy() if root in (None, cluster.rank()) else None
        state = self._state(name)
        held = [h for rank in range(size) for g in self.layout.groups for h in g.held(rank) if h.table.name == name]
        shape = (table.input_dim, table.output_dim)
        indices = [(h.rows, h.columns) for h in held]
        return gather_parts(state.local, indices, shape, root, "hvdkit.gather")

    def ids(self, name: str) -> np.ndarray:
        """Return the id of each row of a table that evicts, on every rank. Every rank calls it."""
        self._table(name)
        found = [changing for changing in self._changing.values() if changing.table.name == name]
        if not found:
            remedy = "ids of others are their rows"
            raise ValueError(describe("table", repr(name), "one made with evict=", remedy))
        agree(Call(f"ids({name!r})"))
        return found[0].gather_ids()

    def assign(self, name: str, full_array: Any) -> None:
        """Set a whole table; each rank takes its part of ``full_array``."""
        table, array = self._table(name), np.asarray(full_array)
        if array.shape != (table.input_dim, table.output_dim):
            expected = f"[{table.input_dim}, {table.output_dim}]"
            raise ValueError(describe("full_array", f"shape {list(array.shape)}", expected, "pass the whole table"))
        if name in self.replicated:
            self.replicated[name].assign(array)
            return
        state = self._state(name)
        box = tuple(slice(i.start, i.stop, i.step) for i in state.local_index)
        state.assign_local(tf.cast(array[box], state.dtype))

    def _table(self, name: str) -> Table:
        if name not in self.tables:
            raise ValueError(describe("table", repr(name), f"one of {list(self.tables)}", "check its name"))
        return self.tables[name]

    def _state(self, name: str) -> PieceState:
        """Return this rank's part of a sharded table."""
        for variable in self.variables:
            shard = shard_of(variable)
            for piece in () if shard is None else shard.pieces:
                if piece.table == name:
                    return PieceState(variable, shard, piece)  # type: ignore[arg-type]
        raise AssertionError(name)


def _split(found: Found, keys: Sequence[tf.Tensor]) -> list[Found]:
    """Return the part of each feature whose keys were looked up together."""
    if len(keys) == 1:
        return [found]
    sizes = tf.stack([tf.size(k) for k in keys])
    return [Found(found.rows, place) for place in tf.split(found.place, sizes, num=len(keys))]


def _beside(parts: Sequence[Any], width: int) -> Any:
    """Put runs of columns beside each other; the last may have been filled up."""
    if isinstance(parts[0], tf.RaggedTensor):
        flat = tf.concat([p.flat_values for p in parts], -1)[..., :width]
        return parts[0].with_flat_values(flat)
    return tf.concat(parts, -1)[..., :width]
