"""One embedding table, cut across ranks: ``keras.layers.Embedding`` for tables that outgrow a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.collectives.values import graph_safe
from hvdkit.errors import describe
from hvdkit.layers.base import ShardedLayer
from hvdkit.layers.collection import ShardedEmbeddingCollection, output_spec
from hvdkit.layers.features import OutOfRange
from hvdkit.layers.lookup import Asked
from hvdkit.planning import Table
from hvdkit.planning.table import Combiner, Evict

_PARTITIONS = {"mod": "row", "div": "div", "column": "column", "replicated": "replicated"}
_TABLE = "embeddings"


class ShardedEmbedding(ShardedLayer):
    """``keras.layers.Embedding`` whose rows are spread over the ranks.

    Each rank holds 1/N of the table; a lookup exchanges the distinct ids and their rows. See
    :class:`ShardedEmbeddingCollection`, which looks any number of tables up in the same exchange, for ids, combiners
    and what every rank has to do.

    Args:
        input_dim: number of rows.
        output_dim: numbers in a row.
        combiner: "sum", "mean" or "sqrtn" over the last axis of ids; None keeps the rows apart.
        partition: "mod" (rows round robin), "div" (contiguous rows), "column" (each rank some columns of all rows) or
            "replicated".
        evict, host: as for :class:`hvdkit.layers.Table`.
        embeddings_initializer: a Keras initializer or its name, or the whole array.
        seed: as for the collection.
        compression, out_of_range: likewise.
        **kwargs: of ``keras.layers.Layer``.

    Raises:
        As the collection.

    Example::

        model = keras.Sequential([keras.Input((10,), dtype="int64"), hk.layers.ShardedEmbedding(10_000_000, 64),
                                  keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
        model.compile(hk.DistributedOptimizer(keras.optimizers.Adagrad(0.1)), "mse")
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        combiner: Combiner | None = None,
        partition: str = "mod",
        embeddings_initializer: Any = "uniform",
        evict: Evict | None = None,
        host: bool = False,
        seed: int | None = None,
        compression: str | None = None,
        out_of_range: OutOfRange = "error",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if partition not in _PARTITIONS:
            raise ValueError(describe("partition", partition, f"one of {list(_PARTITIONS)}", "pass one of them"))
        dtype = self.variable_dtype
        self.table = Table(_TABLE, input_dim, output_dim, combiner, (), embeddings_initializer, dtype, evict, host)
        self.input_dim, self.output_dim, self.combiner = self.table.input_dim, self.table.output_dim, combiner
        self.partition = partition
        self._collection = ShardedEmbeddingCollection(
            [self.table],
            {_TABLE: _PARTITIONS[partition]},
            seed=seed,
            compression=compression,
            out_of_range=out_of_range,
            name=self.name,
            dtype=self.dtype_policy,
        )

    def build(self, input_shape: Any = None) -> None:
        """Make this rank's part."""
        self._collection.build()
        self.built = True

    @graph_safe
    def call(self, inputs: Any, training: bool | None = None) -> tf.Tensor:
        """Return vectors ``[*ids.shape, output_dim]``, or with a combiner ``[*ids.shape[:-1], output_dim]``."""
        given = inputs if isinstance(inputs, Asked) else {_TABLE: inputs}
        return self._collection(given, training=training)[_TABLE]

    @graph_safe
    def ask(self, inputs: Any) -> Asked:
        """Tell the ranks which rows the next call needs, ahead of it; see the collection's."""
        return self._collection.ask({_TABLE: inputs})

    def compute_output_spec(self, inputs: Any, **_: Any) -> Any:
        """Return the output's shape, without a lookup."""
        return output_spec(inputs, self.table, self.compute_dtype)

    def gather(self, root: int | None = None) -> np.ndarray | None:
        """Return the whole table: on every rank, or on ``root`` alone and None elsewhere. Every rank calls it."""
        return self._collection.gather(_TABLE, root)

    def ids(self) -> np.ndarray:
        """Return the id of each row of a table that evicts; see the collection's."""
        return self._collection.ids(_TABLE)

    def assign(self, full_array: Any) -> None:
        """Set the whole table from ``[input_dim, output_dim]``; each rank takes its part."""
        self._collection.assign(_TABLE, full_array)

    def get_config(self) -> dict[str, Any]:
        """Return what ``from_config`` makes an equal layer of."""
        (table,) = self._collection.get_config()["tables"]
        own = {name: getattr(self._collection, name) for name in ("seed", "compression", "out_of_range")}
        shape = {"input_dim": self.input_dim, "output_dim": self.output_dim, "combiner": self.combiner}
        extra = {"partition": self.partition, "embeddings_initializer": table["initializer"]}
        extra |= {"evict": self.table.evict, "host": self.table.host}
        return {**super().get_config(), **shape, **extra, **own}
