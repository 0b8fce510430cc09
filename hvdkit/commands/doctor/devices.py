"""Checks of devices: network interfaces and GPUs."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

import psutil

from hvdkit.commands.doctor.facts import Facts
from hvdkit.commands.doctor.finding import Finding
from hvdkit.machine.subprocesses import run

# Loopback, and bridges that have the same address on every host: ranks that pick one of these wait for ever.
LOCAL_ONLY = re.compile(r"(lo|docker|br-|virbr|veth|cni|flannel|cali|vmnet|vboxnet|podman|lxc|lxd|dummy|tunl)")


class Interface(NamedTuple):
    """A network interface that is up and has an IPv4 address."""

    name: str
    address: str
    megabits: int  # 0: not known

    @property
    def local_only(self) -> bool:
        """Say whether the interface cannot reach other hosts, judged by its name and address.

        Example:
            >>> Interface("docker0", "172.17.0.1", 0).local_only
            True
        """
        return bool(LOCAL_ONLY.match(self.name)) or self.address.startswith("127.")


def interfaces() -> list[Interface]:
    """Return the interfaces that are up and have an IPv4 address, the fastest first."""
    stats = psutil.net_if_stats()
    found = [
        Interface(name, address.address, stats[name].speed)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name in stats and stats[name].isup
    ]
    return sorted(found, key=lambda interface: -interface.megabits)


def network(facts: Facts, found: list[Interface] | None = None) -> Finding:
    """Ranks on several hosts must agree on an interface that reaches all of them."""
    found = interfaces() if found is None else found
    reaching = [interface for interface in found if not interface.local_only]
    local = [interface for interface in found if interface.local_only and interface.name != "lo"]
    details = {
        "usable": [interface._asdict() for interface in reaching],
        "local_only": [interface._asdict() for interface in local],
        "chosen": facts.environment.get("HOROVOD_GLOO_IFACE") or facts.environment.get("OMPI_MCA_btl_tcp_if_include"),
    }
    shown = ", ".join(f"{interface.name} {interface.address}" for interface in reaching)
    if not reaching:
        return Finding("network", "note", "no interface that reaches other hosts: one host only", details=details)
    what = f"{shown} can reach other hosts"
    if local:
        what += f"; {', '.join(interface.name for interface in local)} cannot, and MPI may try"
    if details["chosen"] or (len(reaching) == 1 and not local):
        return Finding("network", "ok", what, details=details)
    name = reaching[0].name
    remedy = (
        f"across hosts choose one: mpirun --mca btl_tcp_if_include {name} --mca oob_tcp_if_include {name}, "
        f"HOROVOD_GLOO_IFACE={name}, NCCL_SOCKET_IFNAME={name}"
    )
    return Finding("network", "note", what, remedy, details)


def nvidia_gpus(timeout: float = 20.0) -> list[str] | None:
    """Return the names of the GPUs that ``nvidia-smi`` lists, or None if it is absent or fails."""
    if not shutil.which("nvidia-smi"):
        return None
    outcome = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], timeout=timeout)
    return [line.strip() for line in outcome.stdout.splitlines() if line.strip()] if outcome.code == 0 else None


def gpus(facts: Facts, devices: Path = Path("/dev")) -> Finding:
    """GPUs that are there must be seen by TensorFlow, and averaged through NCCL."""
    names, nodes = nvidia_gpus(), [node.name for node in devices.glob("nvidia[0-9]*")]
    tensorflow, horovod = facts.training["tensorflow"], facts.training["horovod"]
    seen = tensorflow.get("gpus", [])
    details = {"nvidia_smi": names, "device_nodes": nodes, "tensorflow": seen, "nccl": horovod.get("nccl")}
    if not names and not nodes and not seen:
        if names is None and shutil.which("nvidia-smi"):
            remedy = "run nvidia-smi to see its message; reinstall or reload the NVIDIA driver"
            return Finding("gpus", "warning", "nvidia-smi fails", remedy, details)
        return Finding("gpus", "ok", "none: ranks compute on the CPU", details=details)
    what = f"{len(names or nodes or seen)} GPUs: {', '.join(names or nodes or seen)}"
    if not tensorflow or "error" in tensorflow:
        return Finding("gpus", "note", f"{what}; TensorFlow does not load", details=details)
    if not tensorflow["cuda"]:
        remedy = "pip uninstall -y tensorflow-cpu, then pip install 'tensorflow[and-cuda]>=2.16.2,<2.22'"
        return Finding("gpus", "warning", f"{what}; TensorFlow is built without CUDA", remedy, details)
    if not seen:
        remedy = "check CUDA_VISIBLE_DEVICES, then pip install 'tensorflow[and-cuda]' for the CUDA libraries"
        return Finding("gpus", "warning", f"{what}; TensorFlow sees none of them", remedy, details)
    if facts.training.loaded("horovod") and not (horovod["nccl"] or horovod["rocm"]):
        remedy = "hvdkit build-horovod --gpu nccl"
        return Finding(
            "gpus",
            "warning",
            f"{what}; Horovod is built without NCCL, and averages on the CPU",
            remedy,
            details,
        )
    if facts.np > len(seen):
        remedy = f"-np {len(seen)}: one rank per GPU"
        return Finding("gpus", "warning", f"{what}, but {facts.np} ranks: ranks would share GPUs", remedy, details)
    remedy = "model.compile(jit_compile=False): Keras turns XLA on with GPUs, and Horovod has no XLA kernels"
    return Finding("gpus", "note", what, remedy, details)


CHECKS = (network, gpus)
