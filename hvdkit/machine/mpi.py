"""MPI on this host: its launchers, and its libraries loaded in this process."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdkit.machine.subprocesses import run

# Open MPI's mpirun runs as root only with both set to 1.
ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_VERSIONS = (  # what `mpirun --version` and MPI_Get_library_version print
    ("Open MPI", re.compile(r"Open MPI\)?,? v?([\d.]+)")),
    ("MPICH", re.compile(r"(?:MPICH Version|HYDRA build details:\s*Version):\s*([\w.]+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library\D*?([\d.]+)")),
)
# The C library only, not libmpi_cxx or libmpi_mpifh. In a wheel, the name may contain a hash.
_LIBRARY = re.compile(r"/lib(mpi|mpich|mpi_abi)(-[0-9a-f]+)?\.so[.0-9]*$")


@dataclass(frozen=True)
class Mpi:
    """Vendor and version of an MPI, e.g. ``Mpi("Open MPI", "4.1.8")``."""

    vendor: str
    version: str

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version, maxsplit=1)[0] or 0)

    def __str__(self) -> str:
        return f"{self.vendor} {self.version}".strip()


@dataclass(frozen=True)
class MpiLauncher:
    """A launcher: its path, whether it is on PATH, and the MPI that it belongs to."""

    path: str
    on_path: bool
    mpi: Mpi | None = None


def find_program(name: str) -> MpiLauncher | None:
    """Find a program on PATH, or otherwise next to this interpreter (for an environment that is not activated)."""
    if path := shutil.which(name):
        return MpiLauncher(path, on_path=True)
    sibling = Path(sys.executable).parent / name
    return MpiLauncher(str(sibling), on_path=False) if os.access(sibling, os.X_OK) else None


def find_mpirun() -> MpiLauncher | None:
    """Find ``mpirun`` (or ``mpiexec``) and the MPI that it belongs to."""
    program = find_program("mpirun") or find_program("mpiexec")
    if program is None:
        return None
    outcome = run([program.path, "--version"], timeout=20)
    return MpiLauncher(program.path, program.on_path, identify(outcome.stdout + outcome.stderr))


def identify(text: str) -> Mpi | None:
    """Return vendor and version from the version message of an MPI library or launcher.

    Example:
        >>> str(identify("mpirun (Open MPI) 4.1.8"))
        'Open MPI 4.1.8'
    """
    for vendor, pattern in _VERSIONS:
        if match := pattern.search(text):
            return Mpi(vendor, match.group(1).rstrip("."))
    return None


def loaded_libraries() -> list[str]:
    """Return the resolved paths of the MPI libraries loaded into this process, sorted."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        mapped = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    else:  # macOS
        mapped = {entry.path for entry in psutil.Process().memory_maps()}
    return sorted({str(Path(path).resolve()) for path in mapped if _LIBRARY.search(path)})


def tensorflow_exports_hwloc() -> bool:
    """Return whether the installed TensorFlow exports functions of hwloc, without importing it."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        return False
    framework = Path(spec.origin).with_name("libtensorflow_framework.so.2")
    return framework.exists() and hasattr(ctypes.CDLL(str(framework)), "hwloc__topology_disadopt")
