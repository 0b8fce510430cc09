"""Variables sharded across ranks, and the exchange that looks up their rows."""

from hvdkit.variable.partitioned import PartitionedVariable

__all__ = ["PartitionedVariable"]
