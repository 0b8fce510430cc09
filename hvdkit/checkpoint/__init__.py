"""Checkpoints of N ranks that restore at any number of ranks: whole or not there, verified to the byte."""

from hvdkit.checkpoint.folder import latest
from hvdkit.checkpoint.state import ShardedState
from hvdkit.checkpoint.store import restore, save

__all__ = ["ShardedState", "latest", "restore", "save"]
