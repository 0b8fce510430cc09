"""A sharded embedding table: ``keras.layers.Embedding`` for tables larger than one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.collectives.conversion import graph_safe
from hvdkit.errors import describe
from hvdkit.layers.collection import ShardedEmbeddingCollection, deserialize, table_config
from hvdkit.layers.features import Ids, OutOfRange, Vectors
from hvdkit.layers.lookup import PendingLookup
from hvdkit.layers.sharded_layer import ShardedLayer
from hvdkit.sharding.table import Combiner, Evict, Initializer, Table

_PARTITIONS = {"mod": "row", "div": "div", "column": "column", "replicated": "replicated"}
_TABLE = "embeddings"
# Unsupported arguments of keras.layers.Embedding, and alternatives.
_UNSUPPORTED = {
    "embeddings_constraint": "it would need the whole table after every update; limit the rows that a lookup returns",
    "weights": "pass the array as embeddings_initializer, or call layer.set_weights([array])",
    "lora_rank": "tables train as they are; leave it out",
    "lora_alpha": "tables train as they are; leave it out",
    "quantization_config": "rows are sent in 16 bits with compression='fp16' or 'bf16'",
}


class _Lookup(ShardedEmbeddingCollection):
    """The collection inside a single-table layer; Keras converts ids to floats for a layer without an ``Input``."""

    _floats = True


@keras.saving.register_keras_serializable("hvdkit")
class ShardedEmbedding(ShardedLayer):
    """A ``keras.layers.Embedding`` sharded across ranks.

    Each rank holds 1/N of the table; a lookup exchanges the distinct ids and their rows. For ids, combiners and the
    requirements on ranks, see ``hk.layers.ShardedEmbeddingCollection``, which looks up any number of tables in one
    exchange.

    Ids may be floats, as Keras passes them in a ``Sequential`` without ``keras.Input``, if they are whole numbers and
    the dtype represents every row exactly (float32: tables of up to 16,777,216 rows).

    Args:
        input_dim: number of rows.
        output_dim: number of columns.
        combiner: "sum", "mean" or "sqrtn" over the last axis of ids; None returns one row per id.
        partition: "mod" (rows round robin), "div" (contiguous rows), "column" (each rank some columns of all rows) or
            "replicated".
        embeddings_initializer: a Keras initializer or its name, or the unsharded array.
        embeddings_regularizer: ``L1``, ``L2`` or ``L1L2`` of ``keras.regularizers``, or a name: a penalty on the entire
            table, in the layer's ``losses`` on every rank. Each step then reads and updates the entire table.
        mask_zero: id 0 is padding. Without a combiner the output has a Keras mask; a combiner skips padding.
        optimizer: optimizer of this table, instead of the model's; see ``hk.layers.Table``.
        evict: as for ``hk.layers.Table``.
        host: as for ``hk.layers.Table``.
        seed: as for ``hk.layers.ShardedEmbeddingCollection``.
        compression: as for ``hk.layers.ShardedEmbeddingCollection``.
        out_of_range: as for ``hk.layers.ShardedEmbeddingCollection``.
        **kwargs: arguments of ``keras.layers.Layer``.

    Raises:
        TypeError: ids are floats whose dtype cannot represent every row, or an argument of ``keras.layers.Embedding``
            is not supported.
        ValueError: an id is not a whole number; or as for ``hk.layers.ShardedEmbeddingCollection``.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> embedding = hk.layers.ShardedEmbedding(1000, 8, combiner="mean", seed=1)
        >>> model = keras.Sequential([keras.Input((None,), dtype="int32"), embedding, keras.layers.Dense(1)])
        >>> model.compile(hk.DistributedOptimizer(keras.optimizers.Adagrad(0.1)), "mse", jit_compile=False)
        >>> model(np.array([[1, 2, 3], [7, 8, 999]])).shape  # this rank's ids
        TensorShape([2, 1])
        >>> embedding.gather().shape  # the entire table, on every rank
        (1000, 8)
        >>> embedding.assign(np.ones((1000, 8)))
        >>> vectors = embedding(embedding.ask(np.array([[1, 2, 3]])))  # ids are exchanged in advance
        >>> vectors.shape, float(vectors[0, 0])
        (TensorShape([1, 8]), 1.0)
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        combiner: Combiner | None = None,
        partition: str = "mod",
        embeddings_initializer: Initializer = "uniform",
        embeddings_regularizer: keras.regularizers.Regularizer | str | None = None,
        mask_zero: bool = False,
        optimizer: keras.optimizers.Optimizer | str | None = None,
        evict: Evict | None = None,
        host: bool = False,
        seed: int | None = None,
        compression: str | None = None,
        out_of_range: OutOfRange = "error",
        **kwargs: object,
    ):
        for name, remedy in _UNSUPPORTED.items():
            if (value := kwargs.pop(name, None)) is not None:
                expected = "None: hk.layers.ShardedEmbedding has no such argument"
                raise TypeError(describe(name, type(value).__name__, expected, remedy))
        super().__init__(**kwargs)
        self.autocast = False  # ids are integers, and weights keep their dtype
        if partition not in _PARTITIONS:
            raise ValueError(describe("partition", partition, f"one of {list(_PARTITIONS)}", "pass one of them"))
        self.table = Table(
            _TABLE,
            input_dim,
            output_dim,
            combiner,
            initializer=embeddings_initializer,
            dtype=self.variable_dtype,
            evict=evict,
            host=host,
            optimizer=optimizer,
            regularizer=embeddings_regularizer,
            mask_zero=mask_zero,
        )
        self.input_dim = self.table.input_dim
        self.output_dim = self.table.output_dim
        self.combiner = combiner
        self.partition = partition
        self.mask_zero = mask_zero
        self._collection = _Lookup(
            [self.table],
            {_TABLE: _PARTITIONS[partition]},
            seed=seed,
            compression=compression,
            out_of_range=out_of_range,
            name=self.name,
            dtype=self.dtype_policy,
        )
        self.supports_masking = self._collection.supports_masking

    def build(self, input_shape: object = None) -> None:
        """Create this rank's part."""
        self._collection.build()
        self.built = True

    @graph_safe
    def call(self, inputs: Ids | PendingLookup, training: bool | None = None) -> Vectors:
        """Return vectors ``[*ids.shape, output_dim]``, or with a combiner ``[*ids.shape[:-1], output_dim]``."""
        request = inputs if isinstance(inputs, PendingLookup) else {_TABLE: inputs}
        return self._collection(request, training=training)[_TABLE]

    @graph_safe
    def ask(self, inputs: Ids) -> PendingLookup:
        """Request the rows of the next call in advance; see ``hk.layers.ShardedEmbeddingCollection.ask``.

        Args:
            inputs: ids, as for a call.

        Returns:
            The request, to pass to the layer instead of ids.
        """
        return self._collection.ask({_TABLE: inputs})

    def compute_output_spec(self, inputs: keras.KerasTensor, **_: object) -> keras.KerasTensor:
        """Return the output's shape, without a lookup."""
        return self._collection.compute_output_spec({_TABLE: inputs})[_TABLE]

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the output's shape for ids of shape ``input_shape``."""
        shape = tuple(input_shape)
        return (*(shape if self.combiner is None or len(shape) < 2 else shape[:-1]), self.output_dim)

    def compute_mask(
        self, inputs: Ids | PendingLookup, previous_mask: object = None
    ) -> tf.Tensor | tf.RaggedTensor | None:
        """Return a mask that is False for padding; None without ``mask_zero`` or with a combiner."""
        masks = self._collection.compute_mask(inputs if isinstance(inputs, PendingLookup) else {_TABLE: inputs})
        return None if masks is None else masks[_TABLE]

    def gather(self, root: int | None = None) -> np.ndarray | None:
        """Return the unsharded table on every rank, or only on ``root``. Every rank calls it.

        Args:
            root: the rank that gets the table; None for all.

        Returns:
            ``[input_dim, output_dim]``; None on ranks other than ``root``.

        Raises:
            ValueError: ``root`` is not a rank.
        """
        return self._collection.gather(_TABLE, root)

    def ids(self) -> np.ndarray:
        """Return the id of each row of a table with eviction, ``[input_dim]`` int64. Every rank calls it.

        Returns:
            As for ``hk.layers.ShardedEmbeddingCollection.ids``.

        Raises:
            ValueError: the table does not evict.

        Examples:
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> words = hk.layers.ShardedEmbedding(64, 8, evict="lru")
            >>> vectors = words(np.array([-5, 10**12]), training=True)  # any integers; new ones get a row
            >>> words.ids().shape, 10**12 in words.ids()
            ((64,), True)
        """
        return self._collection.ids(_TABLE)

    def assign(self, full_array: npt.ArrayLike) -> None:
        """Set the table; each rank takes its part, without communication.

        Args:
            full_array: ``[input_dim, output_dim]``, the same on every rank.

        Raises:
            ValueError: the array has the wrong shape.
        """
        self._collection.assign(_TABLE, full_array)

    def get_weights(self) -> list[np.ndarray]:
        """Return ``[table]``, unsharded, as ``keras.layers.Embedding`` does. Every rank calls it."""
        return self._collection.get_weights()

    def set_weights(self, weights: Sequence[npt.ArrayLike]) -> None:
        """Set the table from ``[table]``, unsharded; each rank keeps its part. Every rank calls it."""
        self._collection.set_weights(weights)

    def get_config(self) -> dict[str, object]:
        """Return the layer's config for ``from_config``."""
        table = table_config(self.table)
        table_options = ("input_dim", "output_dim", "combiner", "evict", "host", "optimizer", "mask_zero")
        config = {name: getattr(self._collection, name) for name in ("seed", "compression", "out_of_range")}
        config |= {"partition": self.partition, **{name: table[name] for name in table_options}}
        embeddings_options = {f"embeddings_{name}": table[name] for name in ("initializer", "regularizer")}
        return {**super().get_config(), **config, **embeddings_options}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ShardedEmbedding:
        """Create a layer from the result of ``get_config``."""
        return cls(**deserialize(config, ("embeddings_initializer", "embeddings_regularizer", "optimizer")))
