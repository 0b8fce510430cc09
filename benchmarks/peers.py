"""Build separate environments for packages that conflict with TensorFlow, when they are first needed.

``benchmarks/peers/NAME.txt`` pins all packages of an environment, so that pip has no dependencies to resolve. pip's own
settings apply (pip.conf, ``PIP_EXTRA_INDEX_URL``, ``PIP_FIND_LINKS``): if PyTorch's default build is for GPUs, point
them to its CPU build.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from processes import Unavailable

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "benchmarks" / "peers"
CACHE = ROOT / ".cache" / "peers"
_SECONDS = 1800
_failed: dict[str, str] = {}


def python(name: str, given: Path | None = None) -> Path:
    """Return the Python of an environment, built first if it is missing or its pins have changed.

    Args:
        name: name of the file with the pins.
        given: Python of a user's environment, to use instead.

    Raises:
        Unavailable: The environment cannot be built; the message is pip's.
    """
    if given is not None:
        return given
    if name in _failed:
        raise Unavailable(_failed[name])
    folder, pins = CACHE / name, PINS / f"{name}.txt"
    made = folder / "made.txt"
    if not made.exists() or made.read_text() != pins.read_text():
        print(f"building {folder}, only once ...", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run(name, [sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
        _run(name, [*pip, "--no-deps", "--requirement", str(pins)])
        shutil.copyfile(pins, made)  # last: marks a complete environment
    return folder / "bin" / "python"


def torch_processes(given: Path | None, size: int, program: Sequence[str]) -> list[str]:
    """Return the command of a Python program in ``size`` processes of PyTorch."""
    launcher = [str(python("torch", given)), "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(size), *program[1:]]


def _run(name: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        output, code = done.stdout + done.stderr, done.returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        output, code = str(error), 1
    if code:
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        _failed[name] = f"the environment {name} cannot be created: {(errors or lines or ['no output'])[-1][:200]}"
        raise Unavailable(_failed[name])
