"""Keras layers larger than one rank."""

from hvdkit.layers.collection import ShardedEmbeddingCollection
from hvdkit.layers.embedding import ShardedEmbedding
from hvdkit.planning import Table

__all__ = ["ShardedEmbedding", "ShardedEmbeddingCollection", "Table"]
