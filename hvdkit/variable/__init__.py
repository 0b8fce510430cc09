"""Variables cut across ranks, and the exchange that looks their rows up."""

from hvdkit.variable.partitioned import PartitionedVariable

__all__ = ["PartitionedVariable"]
