"""Memory available to this process: the host's, and the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from hvdkit.machine import cgroups

# In v2 and v1: the limit, the group's usage, and the key of memory.stat for the reclaimable file cache.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def total_memory(filesystem: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the host's, at most the lowest limit of its groups."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(filesystem))])


def available_memory(filesystem: Path = Path("/")) -> int:
    """Return the bytes available to new processes, on the host and within the limits of this process's groups."""
    free = (max(0, limit - usage) for limit, usage in _limits(filesystem))
    return min([psutil.virtual_memory().available, *free])


def _limits(filesystem: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and usage in bytes of each group with a limit; usage excludes reclaimable file cache."""
    for folder in cgroups.folders("memory", filesystem):
        for limit_file, usage_file, cache_key in _FILES:
            try:
                limit, usage = (int((folder / file).read_text()) for file in (limit_file, usage_file))
                lines = map(str.split, (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such group, or "max"
                continue
            yield limit, usage - sum(int(fields[1]) for fields in lines if fields[:1] == [cache_key])
