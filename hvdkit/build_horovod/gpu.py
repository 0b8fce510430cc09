"""Find CUDA's toolkit and NCCL for ``--gpu nccl``."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hvdkit.build_horovod.mpi import relative_rpath
from hvdkit.errors import BuildError, describe

GET_TENSORFLOW = "pip install 'tensorflow[and-cuda]' (tensorflow-cpu has no GPU devices)"
GET_CUDA = (
    "install the CUDA toolkit of that major version, and set HOROVOD_CUDA_HOME or CUDA_HOME to the folder "
    "that holds bin/nvcc"
)
GET_NCCL = "pip install nvidia-nccl-cu{major}, or set HOROVOD_NCCL_HOME to a folder with include/nccl.h and lib/"


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """A CUDA toolkit and an NCCL to build against; ``rpath`` is where NCCL is looked for at run time."""

    home: Path
    version: str
    nccl_include: Path
    nccl_lib: Path
    rpath: str


def find_cuda() -> Cuda:
    """Return the CUDA toolkit and NCCL that fit the installed TensorFlow.

    Raises:
        BuildError: if TensorFlow has no CUDA, or the toolkit or NCCL is missing or of another major version.
    """
    wanted = _tensorflow_cuda()
    home = _toolkit()
    text = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    version = found[1] if found else "unknown"
    if version.split(".")[0] != wanted.split(".")[0]:
        got = f"CUDA {version} in {home}"
        raise BuildError(describe("--gpu nccl", got, f"CUDA {wanted.split('.')[0]}, as TensorFlow has", GET_CUDA))
    include, lib, rpath = _nccl(wanted.split(".")[0])
    return Cuda(home=home, version=version, nccl_include=include, nccl_lib=lib, rpath=rpath)


def _tensorflow_cuda() -> str:
    """The CUDA version that the installed TensorFlow was built with, e.g. "12.5.1"."""
    program = "from tensorflow.python.platform.build_info import build_info; print(build_info.get('cuda_version'))"
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    version = outcome.stdout.strip().rpartition("\n")[2]
    if not version[:1].isdigit():
        got = "a TensorFlow built without CUDA" if outcome.returncode == 0 else outcome.stderr.strip()[-400:]
        raise BuildError(describe("--gpu nccl", got, "a CUDA build of TensorFlow", GET_TENSORFLOW))
    return version


def _toolkit() -> Path:
    """The folder whose bin/nvcc is to be used."""
    named = [os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    on_path = shutil.which("nvcc")
    places = [*named, on_path and str(Path(on_path).resolve().parent.parent), "/usr/local/cuda"]
    for place in places:
        if place and Path(place, "bin", "nvcc").is_file():
            return Path(place)
    got = "no nvcc in HOROVOD_CUDA_HOME, CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda"
    raise BuildError(describe("--gpu nccl", got, "a CUDA toolkit", GET_CUDA))


def _nccl(major: str) -> tuple[Path, Path, str]:
    """NCCL's include folder, library folder and run path: HOROVOD_NCCL_HOME's, or pip's package's."""
    home = os.environ.get("HOROVOD_NCCL_HOME")
    if home:
        include, lib = Path(home, "include"), Path(home, "lib")
        if (include / "nccl.h").is_file() and any(lib.glob("libnccl*")):
            return include, lib, str(lib)
        got = f"HOROVOD_NCCL_HOME={home} without include/nccl.h or lib/libnccl*"
        raise BuildError(describe("--gpu nccl", got, "NCCL", GET_NCCL.format(major=major)))
    try:
        distribution = importlib.metadata.distribution(f"nvidia-nccl-cu{major}")
    except importlib.metadata.PackageNotFoundError:
        got = f"no package nvidia-nccl-cu{major} and no HOROVOD_NCCL_HOME"
        raise BuildError(describe("--gpu nccl", got, "NCCL", GET_NCCL.format(major=major))) from None
    site = Path(str(distribution.locate_file("")))
    root = site / "nvidia" / "nccl"
    return root / "include", root / "lib", relative_rpath(root / "lib", site)
