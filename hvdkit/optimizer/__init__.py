"""Keras optimizers over ranks: gradients combined before each update, shards updated by rows."""

from hvdkit.optimizer.distributed import DistributedOptimizer
from hvdkit.optimizer.loading import load_model
from hvdkit.optimizer.mixins import ranks_of

__all__ = ["DistributedOptimizer", "load_model", "ranks_of"]
