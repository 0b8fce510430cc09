"""Checks of the host: cores against ranks, root, shared memory, ssh, and variables that steer training."""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path

import psutil

from hvdkit.commands.doctor.facts import Facts
from hvdkit.commands.doctor.finding import Finding

ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
OVERSUBSCRIBE = ("OMPI_MCA_rmaps_base_oversubscribe", "PRTE_MCA_rmaps_default_mapping_policy")
SHOWN = re.compile(
    r"(HOROVOD|OMPI|PMIX_MCA|PRTE_MCA|OPAL|MPI4PY|NCCL|KERAS|XLA|CUDA_VISIBLE"
    r"|TF_(CPP|CONFIG$|ENABLE|FORCE|GPU|NUM|USE|XLA))"
)
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD")
MEBIBYTE = 2**20
# Open MPI maps up to 4 MiB a rank (btl_vader_segment_size); UCX and NCCL take more. Docker grants 64 MiB.
SHM_LEAST, SHM_PER_RANK = 128 * MEBIBYTE, 16 * MEBIBYTE


def cores(facts: Facts) -> Finding:
    """Each rank wants a core of its own, and Open MPI's ``mpirun`` refuses more ranks than physical cores."""
    allowed, physical, quota = allowed_cpus(), psutil.cpu_count(logical=False), cgroup_cpus()
    usable = min(allowed, physical or allowed, quota or allowed)
    details = {"ranks": facts.np, "allowed": allowed, "physical": physical, "cgroup_quota": quota}
    what = f"{usable:g} cores for {facts.np} ranks"
    if facts.np <= usable:
        return Finding("cores", "ok", what, details=details)
    slots = min(allowed, physical or allowed)  # mpirun does not know of a quota
    permitted = any(facts.environment.get(name) for name in OVERSUBSCRIBE)
    if facts.np <= slots or permitted or facts.open_mpi is None:
        remedy = f"-np {max(1, math.floor(usable))} gives each rank a core of its own"
        return Finding("cores", "note", f"{what}: ranks share cores", remedy, details)
    remedy = "mpirun --oversubscribe, or export OMPI_MCA_rmaps_base_oversubscribe=1 (horovodrun needs neither)"
    if facts.open_mpi >= 5:
        remedy = "mpirun --map-by :OVERSUBSCRIBE (horovodrun --gloo needs nothing)"
    return Finding("cores", "warning", f"{what}: ranks share cores, and plain mpirun refuses", remedy, details)


def allowed_cpus() -> int:
    """Return how many hardware threads the scheduler lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows have no affinity to ask for


def cgroup_cpus(filesystem: Path = Path("/")) -> float | None:
    """Return the cores that the container's CPU quota grants, or None if there is no quota.

    Reads this process's control group and every group above it, in cgroup v2 and v1.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, "CPU Interface Files".
    """
    root = filesystem / "sys/fs/cgroup"
    try:
        lines = (filesystem / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version_1 = "cpu" in controllers.split(",")
        if controllers and not version_1:
            continue
        base = root / controllers if version_1 else root
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            quotas.append(_quota_v1(folder) if version_1 else _quota_v2(folder))
            if folder == base:
                break
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota, period = (int((folder / f"cpu.cfs_{part}_us").read_text()) for part in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None


def root(facts: Facts) -> Finding:
    """Open MPI's ``mpirun`` refuses to run as root unless two variables are set."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:  # Windows has no root
        return Finding("root", "ok", "not root", details={"root": False})
    details = {"root": True, **{name: facts.environment.get(name) for name in ROOT_VARIABLES}}
    if facts.open_mpi is None:
        return Finding("root", "ok", "root, and no Open MPI that would refuse it", details=details)
    if all(facts.environment.get(name) == "1" for name in ROOT_VARIABLES):
        return Finding("root", "ok", "root, allowed by " + " and ".join(ROOT_VARIABLES), details=details)
    remedy = "export " + " ".join(f"{name}=1" for name in ROOT_VARIABLES) + ", or mpirun --allow-run-as-root"
    what = "you are root, and plain mpirun refuses root (horovodrun does not)"
    return Finding("root", "warning", what, remedy, details)


def shared_memory(facts: Facts, path: Path = Path("/dev/shm")) -> Finding:
    """Ranks of one host exchange data through /dev/shm; where it is full they die with a bus error."""
    name = "shared-memory"
    if not path.is_dir():
        remedy = "mount a tmpfs on /dev/shm"
        return Finding(name, "warning", f"{path} does not exist: ranks of a host talk over TCP", remedy)
    usage, needed = shutil.disk_usage(path), max(SHM_LEAST, facts.np * SHM_PER_RANK)
    details = {"total_bytes": usage.total, "free_bytes": usage.free, "wanted_bytes": needed}
    what = f"{usage.free // MEBIBYTE} MiB free of {usage.total // MEBIBYTE} in {path}"
    if usage.free >= needed:
        return Finding(name, "ok", what, details=details)
    remedy = "docker run --shm-size=1g; Kubernetes: an emptyDir of medium Memory; or delete old files in it"
    return Finding(name, "warning", f"{what}; {facts.np} ranks want {needed // MEBIBYTE}", remedy, details)


def ssh(facts: Facts) -> Finding:
    """A start on several hosts needs ssh, unless Slurm or Kubernetes starts the processes."""
    path = shutil.which("ssh")
    if path:
        return Finding("ssh", "ok", path, details={"path": path})
    what = "no ssh: ranks on one host only, unless Slurm or Kubernetes starts them"
    return Finding("ssh", "note", what, "install an OpenSSH client to use several hosts", {"path": None})


def environment(facts: Facts) -> Finding:
    """Show the variables that steer Horovod, MPI, NCCL and TensorFlow: a forgotten one explains much."""
    found = {name: value for name, value in sorted(facts.environment.items()) if SHOWN.match(name)}
    shown = {name: "(hidden)" if SECRET.search(name) else value for name, value in found.items()}
    if not shown:
        return Finding("environment", "ok", "no HOROVOD_*, OMPI_MCA_*, NCCL_* or TF_* variable is set")
    what = " ".join(f"{name}={value}" for name, value in shown.items())
    return Finding("environment", "note", what, details=shown)


CHECKS = (cores, root, shared_memory, ssh, environment)
