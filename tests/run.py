"""Run all tests: in one process, on 1 to 4 ranks under MPI and under Gloo, and as jobs that fail.

    python tests/run.py
    python tests/run.py --np 2 3 --no-gloo -k optimizer
    python tests/run.py --np 3 --contract-np     # all of tests/parallel on 3 ranks
    python tests/run.py --unit-only

Test folders:

    tests/unit      in one process, without jobs
    tests/parallel  all on 2 ranks under MPI; tests marked `contract`, at least one per contract of the design, also
                    on 1, 3 and 4 ranks, and those of UNDER_GLOO on 2 ranks under Gloo, which has another transport
    tests/jobs      start jobs, with every launcher: jobs that succeed, fail, are slow, or lose a host, on this
                    host and on several in network namespaces

A launch has no limit on its total time; it is ended as hung if no test ends for ``--stall`` seconds. Limits in
seconds are multiplied by the machine's slowdown (tests/helpers/speed.py), measured at the start and again before the
tests that measure how soon a job ends.

One launch runs all tests of a number of ranks, because starting TensorFlow takes seconds. A test counts once per
launch, and has failed if it failed on any rank. The last line is "N passed, M failed".
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import psutil
import tyro
from helpers import speed
from helpers.jobs import BIN, PERMISSIONS
from helpers.outcomes import Launch, reason, report

ROOT = Path(__file__).resolve().parents[1]
STOP = threading.Event()
"""Set if this run is interrupted: every launch ends, and no new one starts."""
# Files of tests/jobs that compare the seconds until a job ends, and the names of their launches.
TIMED = {"test_hosts.py": "jobs on hosts, timed", "test_one_host.py": "jobs here, timed"}
FIRST = ("np=2, MPI", "jobs", "unit", "np=4, MPI")
"""Names of the launches that take longest, in an order in which two at a time end soonest."""
# Files whose tests marked `contract` cover every kind of exchange: under Gloo only the exchange differs.
UNDER_GLOO = (
    "test_checkpoint.py",
    "test_cluster.py",
    "test_collective_gradients.py",
    "test_collective_rules.py",
    "test_collectives.py",
    "test_divergence.py",
    "test_embedding_collection.py",
    "test_fit.py",
    "test_gradients.py",
    "test_graphs.py",
    "test_mismatch.py",
    "test_partitioned_variable.py",
    "test_process_sets.py",
    "test_sparse_gradients.py",
    "test_supervisor.py",
    "test_variables.py",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Run hvdkit's tests."""

    np: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of ranks under MPI; one launch of tests/parallel for each."""
    contract_np: tuple[int, ...] = (1, 3, 4)
    """Numbers of --np on which only tests marked `contract` run. With -k, all matching tests run."""
    gloo: bool = True
    """Run the contract tests of every kind of exchange again without MPI, with `horovodrun --gloo`."""
    gloo_np: int = 2
    """Number of ranks of the launch under Gloo."""
    unit: Annotated[bool, tyro.conf.arg(aliases=["--single"])] = True
    """Run tests/unit."""
    unit_only: Annotated[bool, tyro.conf.arg(aliases=["--single-only"])] = False
    """Run only tests/unit."""
    k: Annotated[str, tyro.conf.arg(aliases=["-k"])] = ""
    """Run only the tests that match this pytest expression."""
    jobs: Annotated[bool, tyro.conf.arg(aliases=["--faults"])] = True
    """Run tests/jobs: jobs under every launcher, on this host and on several in network namespaces."""
    stall: float = 600.0
    """Seconds without a finished test after which a launch is ended as hung. Its total time has no limit."""
    keep: bool = False
    """Keep the folder with every rank's output, and print its path."""


def program(name: str) -> str:
    """Return the program next to this Python, or else the one on the PATH."""
    local = BIN / name
    found = str(local) if local.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name}: not found next to {sys.executable} or on the path; run `make setup` first")
    return found


def launches(config: Config, folder: Path) -> list[Launch]:
    """Return all launches of this run in order."""
    pytest = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", *(["-k", config.k] if config.k else [])]
    contract = [*pytest, *([] if config.k else ["-m", "contract"])]
    listed = []
    if config.unit or config.unit_only:
        command = [*pytest, "--continue-on-collection-errors", "tests/unit"]
        listed.append(Launch("unit", 1, command, folder / "unit"))
    if config.unit_only:
        return listed
    if config.jobs:
        ignored = [f"--ignore=tests/jobs/{file}" for file in TIMED]
        listed.append(Launch("jobs", 1, [*pytest, *ignored, "tests/jobs"], folder / "jobs"))
        for file, name in TIMED.items():
            listed.append(Launch(name, 1, [*pytest, f"tests/jobs/{file}"], folder / file))
    for n in config.np:
        mpirun = [program("mpirun"), "-np", str(n), "--bind-to", "none"]
        path = folder / f"mpi-{n}"
        tests = contract if n in config.contract_np else pytest
        listed.append(Launch(f"np={n}, MPI", n, [*mpirun, *to_files(tests, path, "OMPI_COMM_WORLD_RANK")], path))
    if config.gloo:
        n, path = config.gloo_np, folder / f"gloo-{config.gloo_np}"
        horovodrun = [program("horovodrun"), "--gloo", "-np", str(n)]
        command = to_files(contract, path, "HOROVOD_RANK", [f"tests/parallel/{name}" for name in UNDER_GLOO])
        listed.append(Launch(f"np={n}, Gloo", n, [*horovodrun, *command], path))
    return listed


def run_all(listed: list[Launch], stall: float) -> Iterator[Launch]:
    """Run all launches, and yield each when it ends.

    Launches of several ranks only fill two cores while they start; later their ranks wait for each other. So two
    launches run at the same time, and when one ends the next one begins, in the order of FIRST. Tests that measure how
    soon a job ends have the machine to themselves.
    """
    timed = [launch for launch in listed if launch.name in TIMED.values()]
    others = [launch for launch in listed if launch not in timed]
    others.sort(key=lambda launch: [*FIRST, launch.name].index(launch.name))

    def run_one(launch: Launch) -> Launch:
        if not STOP.is_set():
            print(f"{launch.name} ...", flush=True)
            run(launch, stall)
        return launch

    for together in (others, timed):
        if not together:
            continue
        os.environ[speed.VARIABLE] = f"{max(speed.slowdown(), speed.measure()):.2f}"  # the load may have increased
        print(f"slowdown of this machine: {speed.slowdown():.2f}", flush=True)
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(run_one, launch) for launch in together]
            for done in as_completed(running):
                yield done.result()


def to_files(
    pytest: list[str], folder: Path, rank_variable: str, files: Sequence[str] = ("tests/parallel",)
) -> list[str]:
    """Return the command of one rank, with its output in a separate file: on one terminal lines would interleave."""
    command = shlex.join([*pytest, *files])
    return ["sh", "-c", f"exec {command} > {shlex.quote(str(folder))}/rank-${rank_variable}.out 2>&1"]


def run(launch: Launch, stall: float) -> None:
    """Run one launch until it ends, or until no test ends for ``stall`` seconds."""
    launch.folder.mkdir(parents=True)
    env = {**os.environ, **PERMISSIONS, "HVDKIT_TEST_RECORDS": str(launch.folder), "TF_CPP_MIN_LOG_LEVEL": "2"}
    env["HVDKIT_TEST_STALL"] = f"{stall:g}"
    # A rank that waits for a core must not look dead.
    env.setdefault("HVDKIT_HEARTBEAT_SECONDS", speed.scaled(10))
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    started = time.monotonic()
    with (launch.folder / "launcher.out").open("w") as out:
        process = subprocess.Popen(launch.command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            launch.exit_code = wait(process, launch.folder, stall)
            launch.stalled = stall if launch.exit_code is None else None
        finally:
            end(process)
    launch.seconds = time.monotonic() - started
    launch.read()


def wait(process: subprocess.Popen[bytes], folder: Path, stall: float) -> int | None:
    """Return the exit code of a launcher, or None if the records in ``folder`` have not grown for ``stall`` seconds."""
    recorded, since = 0, time.monotonic()
    while time.monotonic() - since < stall and not STOP.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
        size = sum(path.stat().st_size for path in folder.glob("rank-*.jsonl"))
        if size != recorded:
            recorded, since = size, time.monotonic()
    return process.poll()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and all its ranks on all hosts; SIGTERM first, so that each rank writes its stacks."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in reversed(family):
        member.terminate()
    _, alive = psutil.wait_procs(family, timeout=10)
    for member in alive:
        member.kill()
    process.wait()


def stop(number: int, frame: FrameType | None) -> None:
    """End all launches and exit."""
    STOP.set()
    raise KeyboardInterrupt


def main() -> int:
    """Run all launches; return the exit code."""
    # A shell starts background jobs with SIGINT ignored and children inherit this, but some tests send SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    config = tyro.cli(Config, description=__doc__)
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-tests-"))
    passed, failures = 0, []
    try:
        for launch in run_all(launches(config, folder), config.stall):
            print(f"{launch.name:12} {launch.summary()}", flush=True)
            text = report(launch)
            if text:
                print(text, flush=True)
            passed += len(launch.passed)
            failures += [f"{test} [{launch.name}] - {reason(details)}" for test, details in launch.failures.items()]
    finally:
        if config.keep:
            print(f"every rank's output is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if not passed and not failures:
        print("no test ran; is -k right?")
    for failure in failures:  # again at the end: users read the last lines first
        print(f"FAILED {failure}")
    print(f"{passed} passed, {len(failures)} failed")
    return 0 if passed and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
