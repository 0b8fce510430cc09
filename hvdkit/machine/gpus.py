"""NVIDIA's GPUs on this host, as its driver lists them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from hvdkit.machine.subprocesses import run


class Gpus(NamedTuple):
    """What is known without CUDA.

    Attributes:
        names: names and driver versions as ``nvidia-smi`` lists them; None if it is absent or fails.
        fails: True if ``nvidia-smi`` is there and fails.
        nodes: names of the device files, such as ``"nvidia0"``.
    """

    names: list[str] | None
    fails: bool
    nodes: list[str]


def find_gpus(devices: Path = Path("/dev"), timeout: float = 20.0) -> Gpus:
    """Look for GPUs.

    Args:
        devices: the folder with device files.
        timeout: seconds for ``nvidia-smi``.
    """
    nodes = sorted(node.name for node in devices.glob("nvidia[0-9]*"))
    if not shutil.which("nvidia-smi"):
        return Gpus(None, False, nodes)
    outcome = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], timeout=timeout)
    if outcome.code != 0:
        return Gpus(None, True, nodes)
    return Gpus([line.strip() for line in outcome.stdout.splitlines() if line.strip()], False, nodes)
