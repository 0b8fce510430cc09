"""Distributed Keras optimizers: combine gradients over ranks before each update, and update sharded tables by row."""

from hvdkit.optimizer.distributed import DistributedOptimizer
from hvdkit.optimizer.loading import load_model
from hvdkit.optimizer.mixins import ranks_of

__all__ = ["DistributedOptimizer", "load_model", "ranks_of"]
