"""Find the CUDA toolkit and NCCL for ``--gpu nccl``, installed on the system or as pip's ``nvidia-*`` packages."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdkit.commands.build_horovod.build_mpi import relative_rpath
from hvdkit.errors import BuildError, describe

GET_TENSORFLOW = "pip install 'tensorflow[and-cuda]' (tensorflow-cpu has no GPU devices)"
GET_CUDA = (
    "install the CUDA toolkit and set HOROVOD_CUDA_HOME or CUDA_HOME to the folder that holds bin/nvcc, or "
    "pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' "
    "'nvidia-cuda-cccl==13.0.*' 'nvidia-cuda-runtime==13.0.*' (CUDA 12 has no compiler on PyPI)"
)
GET_NCCL = "pip install nvidia-nccl-cu{major}, or set HOROVOD_NCCL_HOME to the folder that holds include/nccl.h and lib"
LIBRARY_FOLDERS = ("lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """A CUDA toolkit and an NCCL to build against.

    ``rpath`` is the folder of NCCL at run time; the CUDA runtime is linked statically.
    """

    home: Path
    version: str
    tensorflow_version: str
    nccl_include: Path
    nccl_library: Path
    nccl_version: str
    rpath: str

    @property
    def caution(self) -> str | None:
        """A warning about this toolkit, or None."""
        if self.version.split(".")[0] == self.tensorflow_version.split(".")[0]:
            return None
        return (
            f"caution: CUDA {self.version} against TensorFlow's {self.tensorflow_version}: the driver on the "
            "machines with GPUs must support both"
        )

    def prepare(self, folder: Path) -> dict[str, str]:
        """Create under ``folder`` the layout that CMake and the linker expect; return the build's settings.

        pip's packages have ``lib`` instead of ``lib64``, and lack unversioned names of shared libraries.
        """
        toolkit = folder / "cuda"
        nccl = folder / "nccl"
        for part in ("bin", "lib64"):
            (toolkit / part).mkdir(parents=True)
        nccl.mkdir()
        # nvcc locates its toolkit relative to the path it is called by, without resolving links.
        for tool in (self.home / "bin").iterdir():
            (toolkit / "bin" / tool.name).symlink_to(tool)
        for part in ("include", "nvvm", "targets"):
            if (self.home / part).exists():
                (toolkit / part).symlink_to(self.home / part)
        libraries = next(self.home / name for name in ("lib64", "lib") if (self.home / name).is_dir())
        for library in libraries.iterdir():
            for name in {library.name, re.sub(r"\.so\.\d+$", ".so", library.name)}:
                if not (toolkit / "lib64" / name).is_symlink():
                    (toolkit / "lib64" / name).symlink_to(library)
        (nccl / "libnccl.so").symlink_to(self.nccl_library)
        return {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(toolkit),
            "HOROVOD_NCCL_INCLUDE": str(self.nccl_include),
            "HOROVOD_NCCL_LIB": str(nccl),
            "HOROVOD_NCCL_LINK": "SHARED",
            "CUDAToolkit_ROOT": str(toolkit),
            "CUDACXX": str(toolkit / "bin" / "nvcc"),
            "PATH": str(toolkit / "bin"),
        }


def find_cuda() -> Cuda:
    """Return the CUDA toolkit and the NCCL to build Horovod against.

    Raises:
        BuildError: TensorFlow was built without CUDA, or the toolkit or NCCL is missing.
    """
    tensorflow_version = _tensorflow_cuda()
    home = _toolkit()
    text = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+\.\d+)", text)
    include, library, rpath = _nccl(home, tensorflow_version.split(".")[0])
    header = (include / "nccl.h").read_text(encoding="utf-8", errors="replace")
    parts = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", header)
    return Cuda(
        home=home,
        version=release[1] if release else "of unknown version",
        tensorflow_version=tensorflow_version,
        nccl_include=include,
        nccl_library=library,
        nccl_version=".".join(parts),
        rpath=rpath,
    )


def _tensorflow_cuda() -> str:
    """Return the CUDA version with which the installed TensorFlow was built, e.g. "12.5.1"."""
    program = "import tensorflow as tf; print(tf.sysconfig.get_build_info().get('cuda_version'))"
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    version = outcome.stdout.strip().rpartition("\n")[2]
    if not version[:1].isdigit():
        got = "a TensorFlow built without CUDA" if outcome.returncode == 0 else outcome.stderr.strip()[-400:]
        raise BuildError(describe("--gpu nccl", got, "a CUDA build of TensorFlow", GET_TENSORFLOW))
    return version


def _toolkit() -> Path:
    """Return the folder whose bin/nvcc to use: the first one found, most explicit setting first."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        folder = os.environ.get(name)
        if folder and not Path(folder, "bin", "nvcc").is_file():
            raise BuildError(describe(name, folder, "a folder that holds bin/nvcc", GET_CUDA))
        if folder:
            return Path(folder)
    nvcc = _pip_file("nvidia-cuda-nvcc", "nvcc") or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        got = "no nvcc in CUDA_HOME, this Python environment, PATH or /usr/local/cuda"
        raise BuildError(describe("--gpu nccl", got, "a CUDA toolkit", GET_CUDA))
    # nvcc on PATH may be a link or a script, so ask it for its toolkit.
    outcome = subprocess.run([nvcc, "--dryrun", "probe.cu"], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", outcome.stderr, re.MULTILINE)
    return Path(os.path.normpath(top[1])) if top else Path(nvcc).resolve().parent.parent


def _nccl(cuda_home: Path, major: str) -> tuple[Path, Path, str]:
    """Return NCCL's include folder, library and run path."""
    setting = os.environ.get("HOROVOD_NCCL_HOME")
    for home, rpath in [(Path(setting), None)] if setting else _nccl_folders(cuda_home, major):
        libraries = [library for name in LIBRARY_FOLDERS for library in sorted(home.glob(f"{name}/libnccl.so*"))]
        if libraries and (home / "include" / "nccl.h").is_file():
            return home / "include", libraries[0], rpath or str(libraries[0].parent)
    got = f"HOROVOD_NCCL_HOME={setting} without nccl.h or libnccl.so" if setting else "no nccl.h and libnccl.so"
    raise BuildError(describe("--gpu nccl", got, "NCCL 2", GET_NCCL.format(major=major)))


def _nccl_folders(cuda_home: Path, major: str) -> Iterator[tuple[Path, str | None]]:
    """Yield folders that may contain NCCL, each with its run path if that is relative to Horovod's library."""
    for package in dict.fromkeys((f"nvidia-nccl-cu{major}", "nvidia-nccl-cu12", "nvidia-nccl-cu13")):
        header = _pip_file(package, "nccl.h")
        if header:
            home = Path(header).parent.parent
            yield home, relative_rpath(home / "lib", home.parent.parent)
    yield cuda_home, None
    yield Path("/usr"), None


def _pip_file(package: str, name: str) -> str | None:
    """Return the path of the file ``name`` that pip installed with ``package``, or None."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = [file for file in distribution.files or () if file.name == name]
    return str(distribution.locate_file(files[0])) if files else None
