"""Run real jobs in subprocesses, to test the ranks of a launcher together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from helpers.speed import WAIT

BIN = Path(sys.executable).parent
MPI = ("mpirun", "--tag-output", "--bind-to", "none", "-np")
GLOO = ("horovodrun", "--gloo", "-np")
# The launch that runs the tests must not pass its rank variables on to the jobs that the tests start.
INHERITED = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "HVDKIT_TEST", "TF_CPP_MIN_LOG_LEVEL")


@dataclass(frozen=True)
class Job:
    """The result of a job."""

    code: int
    seconds: float
    output: str


def environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without rank variables, ready to start ranks as root."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    permissions = {"ALLOW_RUN_AS_ROOT": "1", "ALLOW_RUN_AS_ROOT_CONFIRM": "1", "MCA_rmaps_base_oversubscribe": "1"}
    return env | {f"OMPI_{name}": value for name, value in permissions.items()} | extra


def run(code: str, launcher: tuple[str, ...] = (), ranks: int = 1, **extra: str) -> Job:
    """Run Python ``code`` on ``ranks`` ranks; fail if it is still running after ``WAIT`` seconds."""
    launched = [*launcher, str(ranks)] if launcher else []
    started = time.monotonic()
    done = subprocess.run(
        [*launched, sys.executable, "-c", code],
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=WAIT,
        text=True,
        errors="replace",
    )
    return Job(done.returncode, time.monotonic() - started, done.stdout)


def words(pid: int) -> list[str]:
    """Return a process's command line, or an empty list if the process has ended."""
    try:
        process = psutil.Process(pid)
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.Error:
        return []
