"""Gathers the facts for the checks, without any judgement."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from hvdkit.machine.cores import available_cores
from hvdkit.machine.environment import outside_a_job
from hvdkit.machine.mpi import Mpi, MpiLauncher, find_mpirun, find_program, identify
from hvdkit.machine.subprocesses import Outcome, end_all, run

Report: TypeAlias = Mapping[str, Any]  # of a stage of probe.py, from JSON

TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tf-nightly")
KERAS_DISTRIBUTIONS = ("keras", "keras-nightly")  # release candidates of TensorFlow require the nightly build
DISTRIBUTIONS = (*TENSORFLOW_DISTRIBUTIONS, *KERAS_DISTRIBUTIONS, "numpy", "horovod", "mpi4py")


@dataclass(frozen=True)
class Probe:
    """The reports of the stages of ``probe.py``, and the first stage that crashed or hung, if any."""

    stages: Mapping[str, Report]
    failed_stage: str | None
    outcome: Outcome

    def __getitem__(self, stage: str) -> Report:
        return self.stages.get(stage, {})

    def loaded(self, stage: str) -> bool:
        """Return True if the stage ended without an error."""
        return stage in self.stages and "error" not in self.stages[stage]

    def reason(self, stage: str) -> str:
        """Return the reason why a stage failed, in one sentence."""
        if self.failed_stage == stage:
            return f"the process {self.outcome.how}"
        return str(self[stage].get("error", "an earlier import crashed"))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about this machine, from which the checks compute their findings."""

    np: int
    python: tuple[int, int, int]
    system: str
    machine: str
    glibc: str
    installed: Mapping[str, str]  # distribution -> version
    built_for: Mapping[str, str] | None  # Horovod's metadata.json: framework -> version it was compiled for
    training: Probe  # tensorflow, keras, horovod, mpi4py, in this order, in one process
    mpi4py: Probe  # mpi4py in a separate process
    alone: Probe  # MPI started without a launcher
    alone_with_prefix: Probe | None  # the same with OPAL_PREFIX set, if `alone` failed
    mpirun: MpiLauncher | None
    horovodrun: MpiLauncher | None
    environment: Mapping[str, str]

    @property
    def library(self) -> Mpi | None:
        """The MPI that Horovod loads, otherwise the one that mpi4py loads."""
        text = self.training["horovod"].get("library") or self.mpi4py["mpi4py"].get("library") or ""
        return identify(text)

    @property
    def open_mpi(self) -> int | None:
        """The major version of Open MPI if the ``mpirun`` found belongs to it, or None."""
        mpi = self.mpirun.mpi if self.mpirun else None
        return mpi.major if mpi and mpi.vendor == "Open MPI" else None


def gather(np: int | None, timeout: float) -> Facts:
    """Gather the facts, in about the time of importing TensorFlow."""
    with ThreadPoolExecutor() as pool:  # three processes at a time: they mostly wait for libraries to be read
        training = pool.submit(probe, ["tensorflow", "keras", "horovod", "mpi4py"], timeout)
        mpi4py = pool.submit(probe, ["mpi4py"], timeout)
        alone = pool.submit(probe, ["alone"], timeout)
        try:
            prefixed = _alone_with_prefix(alone.result(), mpi4py.result(), timeout)
            wait([training])
        except BaseException:
            end_all()  # otherwise, the pool would wait for its probes on Ctrl-C
            raise
    tensorflow = training.result()["tensorflow"]
    return Facts(
        np=np or len(tensorflow.get("gpus", ())) or available_cores(),
        python=sys.version_info[:3],
        system=platform.system(),
        machine=platform.machine(),
        glibc=" ".join(platform.libc_ver()).strip(),
        installed=installed_versions(),
        built_for=horovod_metadata(),
        training=training.result(),
        mpi4py=mpi4py.result(),
        alone=alone.result(),
        alone_with_prefix=prefixed,
        mpirun=find_mpirun(),
        horovodrun=find_program("horovodrun"),
        environment=dict(os.environ),
    )


def probe(stages: list[str], timeout: float, env: Mapping[str, str] | None = None) -> Probe:
    """Run ``probe.py`` in a subprocess, outside of any MPI job that this process may belong to."""
    environment = {**outside_a_job(os.environ), "TF_CPP_MIN_LOG_LEVEL": "3", **(env or {})}
    outcome = run([sys.executable, "-m", "hvdkit.commands.doctor.probe", *stages], timeout=timeout, env=environment)
    lines = [json.loads(line) for line in outcome.stdout.splitlines() if line.startswith('{"stage"')]
    reports = {line.pop("stage"): line for line in lines}
    return Probe(reports, next((stage for stage in stages if stage not in reports), None), outcome)


def _alone_with_prefix(alone: Probe, mpi4py: Probe, timeout: float) -> Probe | None:
    """Repeat a failed ``alone`` with OPAL_PREFIX, which an Open MPI that was moved after its build needs."""
    if alone.loaded("alone") or not mpi4py.loaded("mpi4py"):
        return None
    return probe(["alone"], timeout, env={"OPAL_PREFIX": mpi_prefix(mpi4py["mpi4py"])})


def mpi_prefix(stage: Report) -> str:
    """Return the prefix of the stage's MPI library: ``/usr/local`` for ``/usr/local/lib/libmpi.so.40``."""
    paths = stage.get("libmpi") or [sys.prefix + "/lib/libmpi.so"]
    return str(Path(paths[0]).parent.parent)


def installed_versions() -> dict[str, str]:
    versions = {}
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def horovod_metadata() -> dict[str, str] | None:
    """Read the frameworks that Horovod was compiled for, from the file that its build adds to the package.

    Returns:
        Version by framework, empty if the file is missing, or None if Horovod is not installed.
    """
    spec = importlib.util.find_spec("horovod")  # finds a top-level package without importing it
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("metadata.json")
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {name: str(version) for name, version in content.items() if name != "dummy"}
