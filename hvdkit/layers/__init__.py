"""Keras layers sharded across ranks, and batch normalization over ranks."""

from hvdkit.layers.collection import ShardedEmbeddingCollection
from hvdkit.layers.embedding import ShardedEmbedding
from hvdkit.layers.parallel_dense import ColumnParallelDense, RowParallelDense
from hvdkit.layers.parallel_loss import vocabulary_parallel_cross_entropy
from hvdkit.optimizer.batch_norm import average_moving_statistics, synchronize_batch_normalization
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
