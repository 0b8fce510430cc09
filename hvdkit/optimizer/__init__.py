"""Keras optimizers over ranks: gradients combined before each update, shards updated by rows."""

from hvdkit.optimizer.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
