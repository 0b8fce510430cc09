"""Keras layers sharded across ranks, and batch normalization over ranks.

Embedding layers take ids and return vectors; their tables are sharded, and each call costs one exchange of ids and one
of rows. Start with ``collection.py``. A call converts inputs to flat ids and rows to outputs (``features.py``), and
exchanges them (``lookup.py``); ``table_store.py`` holds the variables.

Parallel dense layers split one matrix product among the ranks of a mesh axis, which share a batch. Start with
``parallel_dense.py``; ``parallel_loss.py`` is the matching cross-entropy. ``sharded_layer.py`` saves both kinds.
``batch_norm.py`` gives Keras's BatchNormalization the statistics of the global batch.
"""

from hvdkit.layers.batch_norm import average_moving_statistics, synchronize_batch_normalization
from hvdkit.layers.collection import ShardedEmbeddingCollection
from hvdkit.layers.embedding import ShardedEmbedding
from hvdkit.layers.parallel_dense import ColumnParallelDense, RowParallelDense
from hvdkit.layers.parallel_loss import vocabulary_parallel_cross_entropy
from hvdkit.sharding.table import Table

__all__ = [
    "ColumnParallelDense",
    "RowParallelDense",
    "ShardedEmbedding",
    "ShardedEmbeddingCollection",
    "Table",
    "average_moving_statistics",
    "synchronize_batch_normalization",
    "vocabulary_parallel_cross_entropy",
]
