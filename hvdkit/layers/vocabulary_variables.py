"""The Keras variables of a ``hvdkit.sharding.vocabulary.Vocabulary``: which id has which row, and its last use."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np

from hvdkit import cluster
from hvdkit.layers.sharded_layer import memory_device
from hvdkit.sharding.hashing import first_rows
from hvdkit.sharding.partition import rows_of
from hvdkit.sharding.partitioned_variable import gather_parts
from hvdkit.sharding.shards import Piece, RowUsage, Shard, set_holding, shard_of
from hvdkit.sharding.table import BUCKET, Table
from hvdkit.sharding.vocabulary import NO_ID, Vocabulary

_INITIAL = {"ids": (NO_ID, "int64"), "used": (-1, "int64"), "fresh": (False, "bool")}


class VocabularyVariables:
    """The variables of the mapping from ids to rows on this rank; ``rows`` holds its rows of the table."""

    def __init__(self, layer: keras.layers.Layer, table: Table, rows: keras.Variable, seed: int):
        self.table = table
        self._rows = rows
        self._buckets = rows_of("div", table.buckets, cluster.rank(), cluster.size())
        shape = (table.input_dim, table.output_dim)
        self._first_rows = first_rows(table.initializer, shape, table.dtype, seed, table.name)
        with memory_device(table.host):
            self._usage = {name: self._add_weight(layer, name, *_INITIAL[name]) for name in _INITIAL}
            self._clock = layer.add_weight(
                name=f"{table.name}_clock", shape=(2,), initializer="zeros", dtype="int64", trainable=False
            )
        self.register_shards()

    def _add_weight(self, layer: keras.layers.Layer, name: str, initial_value: int, dtype: str) -> keras.Variable:
        def initial_values(shape: Sequence[int], dtype: str) -> np.ndarray:
            return np.full(shape, initial_value, dtype)

        return layer.add_weight(
            name=f"{self.table.name}_{name}",
            shape=(len(self._buckets), BUCKET),
            initializer=initial_values,
            dtype=dtype,
            trainable=False,
            autocast=False,
        )

    def register_shards(self) -> None:
        """Register all variables as shards, again if Keras has created the TensorFlow variables in the meantime."""
        shard = shard_of(self._rows)
        assert shard is not None
        shape = (self.table.buckets, BUCKET)
        index = (self._buckets, range(BUCKET))
        for name, variable in self._usage.items():
            piece = Piece(self.table.name, shape, index, 0, "bucket")
            set_holding(variable, Shard(shard.owner, (piece,), name))
        if self._clock._value is not None:
            set_holding(self._rows, Shard(shard.owner, shard.pieces, usage=self._row_usage()))

    def _row_usage(self) -> RowUsage:
        return RowUsage(**{name: v._value for name, v in self._usage.items()}, clock=self._clock._value)

    def source(self, training: bool | None) -> Vocabulary:
        """Return the source of rows for lookups."""
        return Vocabulary(
            rows=self._rows._value,
            usage=self._row_usage(),
            table=self.table,
            buckets=self._buckets,
            first_rows=self._first_rows,
            training=training,
        )

    def gather_ids(self) -> np.ndarray:
        """Return the id of each row of the entire table, ``[input_dim]``; ``NO_ID`` for free rows."""
        size = cluster.size()
        shape = (self.table.buckets, BUCKET)
        indices = [(rows_of("div", self.table.buckets, rank, size), range(BUCKET)) for rank in range(size)]
        whole = gather_parts(self._usage["ids"]._value, indices, shape, None, "hvdkit.ids")
        assert whole is not None
        return whole.reshape(-1)
