"""Checks of the host: cores, root, shared memory, ssh, environment variables, network interfaces, GPUs."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

from hvdkit.commands.doctor.facts import Facts
from hvdkit.commands.doctor.finding import Finding
from hvdkit.machine import supported
from hvdkit.machine.cores import affinity, available_cores, core_quota, physical_cores
from hvdkit.machine.environment import SECRET
from hvdkit.machine.gpus import find_gpus
from hvdkit.machine.interfaces import Address, own_addresses
from hvdkit.machine.mpi import ROOT_VARIABLES

OVERSUBSCRIBE = ("OMPI_MCA_rmaps_base_oversubscribe", "PRTE_MCA_rmaps_default_mapping_policy")
SHOWN = re.compile(
    r"(HOROVOD|OMPI|PMIX_MCA|PRTE_MCA|OPAL|MPI4PY|NCCL|KERAS|XLA|CUDA_VISIBLE"
    r"|TF_(CPP|CONFIG$|ENABLE|FORCE|GPU|NUM|USE|XLA))"
)
MEBIBYTE = 2**20
# Open MPI maps up to 4 MiB per rank (btl_vader_segment_size); UCX and NCCL use more. Docker's default is 64 MiB.
SHM_LEAST = 128 * MEBIBYTE
SHM_PER_RANK = 16 * MEBIBYTE


def cores(facts: Facts, filesystem: Path = Path("/")) -> Finding:
    """Check for a core per rank. Open MPI's ``mpirun`` rejects more ranks than physical cores.

    Args:
        filesystem: the folder that contains ``proc`` and ``sys``.
    """
    usable = available_cores(filesystem)
    allowed = len(affinity())
    physical = physical_cores()
    slots = min(allowed, physical or allowed)  # mpirun ignores quotas
    most = min(usable, slots)  # ranks that can have a core each
    details = {
        "ranks": facts.np,
        "available": usable,
        "allowed": allowed,
        "physical": physical,
        "cgroup_quota": core_quota(filesystem),
    }
    available = (
        f"{usable} core{'s' * (usable != 1)}" if slots >= usable else f"{usable} hardware threads of {slots} cores"
    )
    what = f"{available} for {facts.np} rank{'s' * (facts.np != 1)}"
    if facts.np <= most:
        return Finding("cores", "ok", what, details=details)
    oversubscribes = any(facts.environment.get(name) for name in OVERSUBSCRIBE)
    if facts.np <= slots or oversubscribes or facts.open_mpi is None:
        remedy = f"-np {most} gives each rank its own core"
        return Finding("cores", "note", f"{what}: ranks share cores", remedy, details)
    remedy = "mpirun --oversubscribe, or export OMPI_MCA_rmaps_base_oversubscribe=1 (horovodrun needs neither)"
    if facts.open_mpi >= 5:
        remedy = "mpirun --map-by :OVERSUBSCRIBE (horovodrun --gloo needs nothing)"
    return Finding(
        "cores", "warning", f"{what}: ranks share cores, and plain mpirun refuses to start them", remedy, details
    )


def root(facts: Facts) -> Finding:
    """Check for root, as which Open MPI's ``mpirun`` refuses to run unless two variables are set."""
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
    """Check the size of /dev/shm, through which ranks on a host exchange data. If full, they die of a bus error."""
    name = "shared-memory"
    if not path.is_dir():
        remedy = "mount a tmpfs on /dev/shm"
        return Finding(name, "warning", f"{path} does not exist: ranks on one host communicate over TCP", remedy)
    usage = shutil.disk_usage(path)
    needed = max(SHM_LEAST, facts.np * SHM_PER_RANK)
    details = {"total_bytes": usage.total, "free_bytes": usage.free, "wanted_bytes": needed}
    what = f"{usage.free // MEBIBYTE} MiB free of {usage.total // MEBIBYTE} in {path}"
    if usage.free >= needed:
        return Finding(name, "ok", what, details=details)
    remedy = "docker run --shm-size=1g; Kubernetes: an emptyDir of medium Memory; or delete old files in it"
    return Finding(name, "warning", f"{what}; {facts.np} ranks want {needed // MEBIBYTE}", remedy, details)


def ssh(facts: Facts) -> Finding:
    """Check for ssh, which several hosts require unless Slurm or Kubernetes starts the processes."""
    path = shutil.which("ssh")
    if path:
        return Finding("ssh", "ok", path, details={"path": path})
    what = "no ssh: ranks on one host only, unless Slurm or Kubernetes starts them"
    return Finding("ssh", "note", what, "install an OpenSSH client to use several hosts", {"path": None})


def environment(facts: Facts) -> Finding:
    """List the user's variables for Horovod, MPI, NCCL and TensorFlow: forgotten ones explain many problems."""
    variables = {name: value for name, value in sorted(facts.environment.items()) if SHOWN.match(name)}
    shown = {name: "(hidden)" if SECRET.search(name) else value for name, value in variables.items()}
    if not shown:
        return Finding("environment", "ok", "no variable is set that changes Horovod, Open MPI, NCCL or TensorFlow")
    what = " ".join(f"{name}={value}" for name, value in shown.items())
    return Finding("environment", "note", what, details=shown)


def network(facts: Facts, addresses: list[Address] | None = None) -> Finding:
    """Check the network interfaces: ranks on several hosts must use one that reaches all of them."""
    addresses = own_addresses(socket.AF_INET) if addresses is None else addresses
    external = [each for each in addresses if not each.is_local]
    local = [each for each in addresses if each.is_local and each.interface != "lo"]
    details = {
        "usable": [each._asdict() for each in external],
        "local_only": [each._asdict() for each in local],
        "chosen": facts.environment.get("HOROVOD_GLOO_IFACE") or facts.environment.get("OMPI_MCA_btl_tcp_if_include"),
    }
    if not external:
        return Finding("network", "note", "no interface that reaches other hosts: one host only", details=details)
    what = f"{', '.join(f'{each.interface} {each.address}' for each in external)} can reach other hosts"
    if local:
        what += f"; {', '.join(each.interface for each in local)} cannot, and MPI may try"
    if details["chosen"] or (len(external) == 1 and not local):
        return Finding("network", "ok", what, details=details)
    name = external[0].interface
    remedy = (
        f"across hosts choose one: mpirun --mca btl_tcp_if_include {name} --mca oob_tcp_if_include {name}, "
        f"HOROVOD_GLOO_IFACE={name}, NCCL_SOCKET_IFNAME={name}"
    )
    return Finding("network", "note", what, remedy, details)


def gpus(facts: Facts, devices: Path = Path("/dev")) -> Finding:
    """Check that TensorFlow sees all GPUs, and that Horovod was built with NCCL."""
    names, fails, device_files = find_gpus(devices)
    tensorflow = facts.training["tensorflow"]
    horovod = facts.training["horovod"]
    seen = tensorflow.get("gpus", [])
    details = {"nvidia_smi": names, "device_nodes": device_files, "tensorflow": seen, "nccl": horovod.get("nccl")}
    if not names and not device_files and not seen:
        if fails:
            remedy = "run nvidia-smi to see its message; reinstall or reload the NVIDIA driver"
            return Finding("gpus", "warning", "nvidia-smi fails", remedy, details)
        return Finding("gpus", "ok", "none: ranks compute on the CPU", details=details)
    gpu_names = names or device_files or seen
    what = f"{len(gpu_names)} GPUs: {', '.join(gpu_names)}"
    if not tensorflow or "error" in tensorflow:
        return Finding("gpus", "note", f"{what}; TensorFlow does not load", details=details)
    if not tensorflow["cuda"]:
        gpu_build = f"tensorflow[and-cuda]{supported.TENSORFLOW_RELEASES}"
        remedy = f"pip uninstall -y tensorflow-cpu, then pip install '{gpu_build}'"
        return Finding("gpus", "warning", f"{what}; TensorFlow is built without CUDA", remedy, details)
    if not seen:
        remedy = "check CUDA_VISIBLE_DEVICES, then pip install 'tensorflow[and-cuda]' for the CUDA libraries"
        return Finding("gpus", "warning", f"{what}; TensorFlow sees none of them", remedy, details)
    if facts.training.loaded("horovod") and not (horovod["nccl"] or horovod["rocm"]):
        remedy = "hvdkit build-horovod --gpu nccl"
        what += "; Horovod is built without NCCL, and averages on the CPU"
        return Finding("gpus", "warning", what, remedy, details)
    if facts.np > len(seen):
        remedy = f"-np {len(seen)}: one rank per GPU"
        return Finding("gpus", "warning", f"{what}, but {facts.np} ranks: ranks would share GPUs", remedy, details)
    remedy = "model.compile(jit_compile=False): Keras turns XLA on with GPUs, and Horovod has no XLA kernels"
    return Finding("gpus", "note", what, remedy, details)


CHECKS = (cores, root, shared_memory, ssh, environment, network, gpus)
