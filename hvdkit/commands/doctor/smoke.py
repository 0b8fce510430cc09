"""``hvdkit doctor --smoke``: train small programs with each launcher and compare them with one process.

Each job runs :mod:`hvdkit.commands.doctor.smoke_program` on two or three ranks. It passes if it ends as expected and
every rank found its own results right.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hvdkit.commands.run.engine_choice import EngineFacts
from hvdkit.errors import ClusterError
from hvdkit.machine.environment import outside_a_job
from hvdkit.machine.mpi import ROOT_VARIABLES
from hvdkit.machine.subprocesses import Outcome, run

_PROGRAM = (sys.executable, "-m", "hvdkit.commands.doctor.smoke_program")
_SHOWN_LINES = 12


@dataclass(frozen=True, kw_only=True)
class SmokeJob:
    """A job, and how it must end."""

    shows: str  # what is proved if the job passes
    launcher: tuple[str, ...]  # words of the command that starts the ranks, without the program
    program: tuple[str, ...]  # name and arguments of the program
    words: tuple[str, ...]  # texts that the job's output must contain
    fails: bool = False  # whether the job must end with an exit code other than 0

    def problem(self, outcome: Outcome) -> str | None:
        """Return what is wrong with the job's end; None if it passes."""
        output = outcome.stdout + outcome.stderr
        missing = [word for word in self.words if word not in output]
        if outcome.code is None or (outcome.code != 0) != self.fails:
            return f"the job {outcome.how}"
        return f"the job's output lacks {missing[0]!r}" if missing else None


def jobs(folder: Path, facts: EngineFacts) -> list[SmokeJob]:
    """Return the jobs, for the launchers of this environment; checkpoints go to ``folder``.

    Raises:
        ClusterError: Horovod or its launcher is not installed, or no port can be opened.
    """
    _check_ports()
    if facts.horovodrun is None:
        raise ClusterError("horovodrun was not found; run `hvdkit build-horovod`, which installs it")
    horovodrun = facts.horovodrun.path
    first: tuple[str, ...] = (horovodrun, "--gloo")
    second = first
    name = "horovodrun --gloo"
    if facts.built_mpi and facts.mpirun is not None:
        is_open_mpi = facts.mpi is not None and facts.mpi.vendor == "Open MPI"
        first = (horovodrun,)
        second = (facts.mpirun.path, *(["--oversubscribe"] if is_open_mpi else []))
        name = "mpirun"
    logdir = str(folder / "line")
    return [
        SmokeJob(
            shows="horovodrun: a partitioned variable, a sharded table, a network and a line equal one process",
            launcher=(*first, "-np", "2"),
            program=("systems", logdir, "20"),
            words=("smoke: systems passed on 2 ranks",),
        ),
        SmokeJob(
            shows=f"{name}: three ranks continue the line from its checkpoint, and equal one process",
            launcher=(*second, "-np", "3"),
            program=("line", logdir, "40"),
            words=("smoke: line passed on 3 ranks", "step 20"),
        ),
        SmokeJob(
            shows=f"{name}: hk.fit equals Keras's fit in one process",
            launcher=(*second, "-np", "2"),
            program=("fit",),
            words=("smoke: fit passed on 2 ranks",),
        ),
        SmokeJob(
            shows="hvdkit run: a rank that is killed ends the job and is named",
            launcher=(sys.executable, "-m", "hvdkit", "run", "-np", "2", "--"),
            program=("kill",),
            words=("rank 1", "SIGKILL"),
            fails=True,
        ),
    ]


def _check_ports() -> None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            pass
    except OSError as error:
        remedy = "allow this process to open ports, and start the loopback interface: ip link set lo up"
        raise ClusterError(f"ranks cannot connect to each other on 127.0.0.1 ({error}); {remedy}") from error


def smoke(timeout: float) -> int:
    """Run all jobs, print a line for each and "N passed, M failed"; return the exit code.

    Args:
        timeout: seconds after which a job counts as hung.
    """
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="hvdkit smoke ") as folder:  # a path with a space
            to_run = jobs(Path(folder), EngineFacts())
            print(f"{len(to_run)} jobs, one after another: about a minute on an idle machine", flush=True)
            outcomes = [_passes(job, timeout) for job in to_run]
    except ClusterError as error:
        print(f"FAILED {error}")
        outcomes = [False]
    print(f"{time.monotonic() - began:.0f} s")
    print(f"{outcomes.count(True)} passed, {outcomes.count(False)} failed")
    return 0 if all(outcomes) else 1


def _passes(job: SmokeJob, timeout: float) -> bool:
    command = [*job.launcher, *_PROGRAM, *job.program]
    outcome = run(command, timeout=timeout, env=_environment())
    problem = job.problem(outcome)
    print(f"{'FAILED' if problem else 'passed'} {outcome.seconds:5.1f} s  {job.shows}", flush=True)
    if problem:
        output = outcome.stdout + outcome.stderr
        lines = [line.rstrip() for line in output.splitlines() if line.strip(" -*\t")]
        shown = [f"    | {line}" for line in lines[-_SHOWN_LINES:] or ["(none)"]]
        again = f"    to run it again: {' '.join(command)}"
        print(f"    {problem}; its last lines:", *shown, again, sep="\n", flush=True)
    return problem is None


def _environment() -> dict[str, str]:
    environment = outside_a_job(dict(os.environ)) | dict.fromkeys(ROOT_VARIABLES, "1")
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    return environment
