"""Find the build tools of this machine and Python, or report which are missing and how to get them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from hvdkit.errors import BuildError, describe
from hvdkit.machine import supported
from hvdkit.machine.cores import available_cores
from hvdkit.machine.memory import available_memory

OLDEST_CMAKE = Version("3.13")
MEMORY_PER_JOB = 1_500_000_000  # bytes; compiling TensorFlow's headers takes slightly more than 1 GB

GET_COMPILER = (
    "install a C++ compiler and make, e.g. 'apt install g++ make', 'dnf install gcc-c++ make', "
    "or without root 'conda install -c conda-forge cxx-compiler make'"
)


@dataclass(frozen=True, kw_only=True)
class TensorFlow:
    """The installed TensorFlow: the name of its distribution and its version."""

    distribution: str
    version: str

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor), e.g. (2, 21)."""
        parsed = Version(self.version)
        return parsed.major, parsed.minor


def find_tensorflow() -> TensorFlow:
    """Return the installed TensorFlow, found by its metadata without importing it.

    Raises:
        BuildError: TensorFlow is not installed, or its version is not supported.
    """
    names = importlib.metadata.packages_distributions().get("tensorflow", [])
    if not names:
        remedy = f"pip install 'hvdkit[cpu]' or 'hvdkit[gpu]' (its wheels are for {supported.PYTHON})"
        raise BuildError(describe("TensorFlow", "none installed", supported.TENSORFLOW, remedy))
    version = importlib.metadata.version(names[0])
    found = TensorFlow(distribution=names[0], version=version)
    if not supported.OLDEST_TENSORFLOW <= found.release <= supported.NEWEST_TENSORFLOW:
        remedy = f"pip install '{names[0]}{supported.TENSORFLOW_RELEASES}'"
        raise BuildError(describe("TensorFlow", f"{names[0]} {version}", supported.TENSORFLOW, remedy))
    return found


def check_compiler() -> str:
    """Compile a C++17 program and return the first line of the compiler's version.

    Raises:
        BuildError: the compiler or make is missing, or the compiler does not support C++17.
    """
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((name for name in candidates if shutil.which(name.split()[0])), None)
    if compiler is None:
        got = f"none of {', '.join(candidates)} on PATH"
        raise BuildError(describe("C++ compiler", got, "one that supports C++17", GET_COMPILER))
    if shutil.which("make") is None:
        raise BuildError(describe("make", "none on PATH", "GNU make", GET_COMPILER))
    program = "#include <string_view>\nint main() { return std::string_view().size(); }\n"
    with tempfile.TemporaryDirectory(prefix="hvdkit-") as folder:
        source = Path(folder, "probe.cc")
        source.write_text(program)
        command = [*compiler.split(), "-std=c++17", str(source), "-o", str(Path(folder, "probe"))]
        outcome = subprocess.run(command, capture_output=True, text=True)
    if outcome.returncode:
        got = f"{compiler} failed on a C++17 program: {outcome.stderr.strip()[:400]}"
        raise BuildError(describe("C++ compiler", got, "one that supports C++17 (GCC 9 or newer)", GET_COMPILER))
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True).stdout
    return version.splitlines()[0] if version else compiler


def has_cmake() -> bool:
    """Return whether PATH has a working CMake that is new enough."""
    try:
        text = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    match = re.search(r"version (\d+(\.\d+)+)", text)
    return match is not None and Version(match[1]) >= OLDEST_CMAKE


def most_jobs() -> int:
    """Return how many compiler processes the cores and the free memory allow."""
    return max(1, min(available_cores(), available_memory() // MEMORY_PER_JOB))
