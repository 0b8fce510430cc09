"""NVIDIA GPUs on this host, as listed by the driver."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from hvdkit.machine.subprocesses import run


class Gpus(NamedTuple):
    """The GPUs, as far as known without CUDA.

    Attributes:
        names: names and driver versions as listed by ``nvidia-smi``; None if it is missing or fails.
        fails: whether ``nvidia-smi`` is installed but fails.
        device_files: names of the device files, e.g. ``"nvidia0"``.
    """

    names: list[str] | None
    fails: bool
    device_files: list[str]


def gpu_device_files(devices: Path = Path("/dev")) -> list[str]:
    """Return the names of the GPUs' device files, which is faster than ``nvidia-smi``."""
    return sorted(file.name for file in devices.glob("nvidia[0-9]*"))


def find_gpus(devices: Path = Path("/dev")) -> Gpus:
    """Find the GPUs of this host, whose device files are in the folder ``devices``."""
    device_files = gpu_device_files(devices)
    if not shutil.which("nvidia-smi"):
        return Gpus(None, False, device_files)
    outcome = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], timeout=20.0)
    if outcome.code != 0:
        return Gpus(None, True, device_files)
    return Gpus([line.strip() for line in outcome.stdout.splitlines() if line.strip()], False, device_files)
