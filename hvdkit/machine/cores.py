"""Cores available to this process: its affinity, and the CPU quota of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from hvdkit.machine import cgroups


def available_cores(filesystem: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: those of its affinity, at most its quota, at least 1.

    With simultaneous multithreading, each hardware thread counts as a core.
    """
    quota = core_quota(filesystem)
    cores = len(affinity())
    return cores if quota is None else min(cores, max(1, int(quota)))


def affinity() -> frozenset[int]:
    """Return the numbers of the cores on which the scheduler may run this process."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # macOS has no affinity


def physical_cores() -> int | None:
    """Return the number of physical cores of this host, or None."""
    return psutil.cpu_count(logical=False)


def core_quota(filesystem: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process's control groups in cores, e.g. 1.5; None without a quota."""
    quotas = [
        quota
        for folder in cgroups.folders("cpu", filesystem)
        for quota in (_quota_v2(folder), _quota_v1(folder))
        if quota is not None
    ]
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        microseconds, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if microseconds == "max" else int(microseconds) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        microseconds, period = (int((folder / f"cpu.cfs_{part}_us").read_text()) for part in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return microseconds / period if microseconds > 0 else None
