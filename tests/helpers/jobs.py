"""Run real jobs in subprocesses, to test the ranks of a launcher together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.speed import WAIT

BIN = Path(sys.executable).parent
MPI = ("mpirun", "--tag-output", "--bind-to", "none", "-np")
GLOO = ("horovodrun", "--gloo", "-np")
# Open MPI's permissions to run as root and with more ranks than cores.
PERMISSIONS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
# The launch that runs the tests must not pass its rank variables on to the jobs that the tests start.
INHERITED = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "HVDKIT_TEST", "TF_CPP_MIN_LOG_LEVEL")
# In the environment of every process of a job, at any depth: TF_... variables are always passed on.
MARK = "TF_HVDKIT_TEST_MARK"


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
    return env | PERMISSIONS | extra


def call(command: Sequence[str | os.PathLike[str]] | str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, with its output as text; fail if it is still running after ``WAIT`` seconds."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run(command, **{"env": environment(), "timeout": WAIT, **pipes, **options})


def without(*modules: str) -> str:
    """Return the first lines of a program in which ``modules`` are not installed."""
    return f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def run(code: str, launcher: tuple[str, ...] = (), ranks: int = 1, **extra: str) -> Job:
    """Run Python ``code`` on ``ranks`` ranks; fail if it is still running after ``WAIT`` seconds."""
    launched = [*launcher, str(ranks)] if launcher else []
    started = time.monotonic()
    command = [*launched, sys.executable, "-c", code]
    done = call(command, env=environment(**extra), stderr=subprocess.STDOUT, errors="replace")
    return Job(done.returncode, time.monotonic() - started, done.stdout)


def selected(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Return the values of the parameters ``names`` of each selected test of the file that have these parameters."""
    items = [item for item in request.session.items if item.path == request.path]
    found = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return [tuple(params[name] for name in names) for params in found if {*names} <= {*params}]


def started(job: Callable[..., Any], *names: str) -> Callable[..., Iterator[dict[tuple[Any, ...], Future[Any]]]]:
    """Return a module's fixture that runs ``job`` for each selected test with the parameters ``names``.

    Two jobs run at a time, since they mostly start or wait. The fixture's value is a dictionary of their futures, by
    the values of ``names``.
    """

    @pytest.fixture(scope="module")
    def endings(request: pytest.FixtureRequest) -> Iterator[dict[tuple[Any, ...], Future[Any]]]:
        with ThreadPoolExecutor(2) as pool:
            yield {values: pool.submit(job, *values) for values in selected(request, *names)}

    return endings


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes, at any depth, of a job that was started with ``{MARK: mark}`` in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def words(pid: int) -> list[str]:
    """Return a process's command line, or an empty list if the process has ended."""
    try:
        process = psutil.Process(pid)
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.Error:
        return []
