"""Run the tests of a tier: in one process, on 1 to 4 ranks under MPI and under Gloo, and as jobs that fail.

    python tests/run.py                        # the core: ten minutes
    python tests/run.py --tier all             # half an hour
    python tests/run.py --np 2 3 -k optimizer  # all matching tests, whatever their tier
    python tests/run.py --unit-only

Test folders:

    tests/unit      in one process, without jobs
    tests/parallel  each file on 2 ranks under MPI; a test's mark `ranks` names other numbers of ranks. Those files of
                    UNDER_GLOO also run on 2 ranks under Gloo, which has another transport
    tests/jobs      start jobs, with every launcher: jobs that succeed, fail, are slow, or lose a host, on this
                    host and on several in network namespaces

Marks of a test name its tier and its numbers of ranks: see tests/helpers/tiers.py.

A launch has no limit on its total time; it is ended as hung if no test ends for ``--stall`` seconds. Limits in
seconds are multiplied by the machine's slowdown (tests/helpers/speed.py), measured at the start and again before the
tests that measure how soon a job ends.

One launch runs many tests of a number of ranks, because starting TensorFlow takes seconds; its next part runs those
after them, since TensorFlow never frees all memory of a model. If a test ends its launch, the next part begins after
it. A test counts once per launch, and has failed if it failed on any rank. The run ends with the slowest tests and the
seconds of each launch, and its last line is "N passed, M failed".
"""

from __future__ import annotations

import contextlib
import json
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
from helpers.outcomes import BEGUN, Launch, reason, report, slowest
from helpers.tiers import Tier
from helpers.time_limit import UNTIL, is_over

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 25
"""Number of the slowest tests that a run ends with."""
STOP = threading.Event()
"""Set if this run is interrupted: every launch ends, and no new one starts."""
# Files of tests/jobs that compare the seconds until a job ends, and the names of their launches.
TIMED = {"test_hosts.py": "jobs on hosts, timed", "test_one_host.py": "jobs here, timed"}
AT_MOST = 150
"""Tests of several ranks in one part of a launch. TensorFlow never frees 4 MB of each small model that was trained,
11 MB if XLA has compiled it: with all tests at night in one part, three ranks need more than 20 GB."""
RECORDED = ROOT / "tests" / "seconds.json"
"""Seconds of each launch of a tier, written by --record: the longest launch starts first."""
# Under Gloo only the exchange differs: files and tests of each kind of exchange, and at night those of what uses it.
UNDER_GLOO = (
    "test_cluster.py",
    "test_collective_gradients.py",
    "test_collective_rules.py",
    "test_collectives.py",
    "test_gradients.py",
    "test_mismatch.py",
    "test_process_sets.py",
    # A step whose own functions are called with other shares than those they were traced with.
    "test_published_programs.py::test_functions_of_tensorflow_in_a_step",
)
UNDER_GLOO_AT_NIGHT = (
    "test_checkpoint.py",
    "test_divergence.py",
    "test_embedding_collection.py",
    "test_fit.py",
    "test_graphs.py",
    "test_hk_fit_losses.py",
    "test_partitioned_variable.py",
    "test_published_programs.py",
    "test_recompute.py",
    "test_sparse_gradients.py",
    "test_supervisor.py",
    "test_two_gradients.py",
    "test_variables.py",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Run hvdkit's tests."""

    tier: Tier = "core"
    """Tests to run: core (ten minutes on two slow cores), all (half an hour), rest (all without core) or nightly."""
    np: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of ranks under MPI; one launch of tests/parallel for each."""
    gloo: bool = True
    """Run the tests of every kind of exchange again without MPI, with `horovodrun --gloo`; not in the core tier."""
    gloo_np: int = 2
    """Number of ranks of the launch under Gloo."""
    unit: Annotated[bool, tyro.conf.arg(aliases=["--single"])] = True
    """Run tests/unit."""
    unit_only: Annotated[bool, tyro.conf.arg(aliases=["--single-only"])] = False
    """Run only tests/unit."""
    k: Annotated[str, tyro.conf.arg(aliases=["-k"])] = ""
    """Run the tests that match this pytest expression, in each tier that runs them."""
    jobs: Annotated[bool, tyro.conf.arg(aliases=["--faults"])] = True
    """Run tests/jobs: jobs under every launcher, on this host and on several in network namespaces."""
    stall: float = 600.0
    """Seconds without a finished test after which a launch is ended as hung. Its total time has no limit."""
    limit: float | None = None
    """Seconds after which no further test begins: a slow machine skips what is left, and says how many."""
    keep: bool = False
    """Keep the folder with every rank's output, and print its path."""
    seconds: Path | None = None
    """Write the seconds of each launch and test to this JSON file."""
    record: bool = False
    """Keep the seconds of this run's launches in tests/seconds.json, which orders the launches of later runs."""


def program(name: str) -> str:
    """Return the program next to this Python, or else the one on the PATH."""
    local = BIN / name
    found = str(local) if local.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name}: not found next to {sys.executable} or on the path; run `make setup` first")
    return found


def launches(config: Config, folder: Path) -> list[Launch]:
    """Return all launches of this run in order."""
    python = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q"]
    pytest = [*python, *(["-k", config.k] if config.k else ["--tier", config.tier])]
    listed = []
    if config.unit or config.unit_only:
        command = [*pytest, "--continue-on-collection-errors", "tests/unit"]
        listed.append(Launch("unit", 1, command, folder / "unit"))
    if config.unit_only:
        return listed
    if config.jobs:
        ignored = [f"--ignore=tests/jobs/{file}" for file in TIMED]
        listed.append(Launch("jobs", 1, [*pytest, *ignored, "tests/jobs"], folder / "jobs"))
        for file, name in TIMED.items() if config.tier != "core" or config.k else ():
            listed.append(Launch(name, 1, [*pytest, f"tests/jobs/{file}"], folder / file))
    for n in config.np:
        mpirun = [program("mpirun"), "-np", str(n), "--bind-to", "none"]
        path = folder / f"mpi-{n}"
        listed.append(Launch(f"np={n}, MPI", n, [*mpirun, *to_files(pytest, "OMPI_COMM_WORLD_RANK")], path))
    if config.gloo and (config.tier != "core" or config.k):
        n, path = config.gloo_np, folder / f"gloo-{config.gloo_np}"
        if config.tier == "rest" and not config.k:  # the core has no launch under Gloo
            pytest = [*python, "--tier", "all"]
        horovodrun = [program("horovodrun"), "--gloo", "-np", str(n)]
        files = [*UNDER_GLOO, *(UNDER_GLOO_AT_NIGHT if config.tier == "nightly" or config.k else ())]
        command = to_files(pytest, "HOROVOD_RANK", [f"tests/parallel/{name}" for name in files])
        listed.append(Launch(f"np={n}, Gloo", n, [*horovodrun, *command], path))
    return listed


def longest_first(listed: list[Launch], tier: Tier) -> list[Launch]:
    """Return the launches in the order of their recorded seconds, of this tier or of all; unknown ones come first."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    seconds = recorded.get(tier) or recorded.get("all", {})
    return sorted(listed, key=lambda launch: -seconds.get(launch.name, float("inf")))


def lanes() -> int:
    """Return the number of launches at a time: ranks that wait for each other leave cores free."""
    return max(2, len(os.sched_getaffinity(0)) // 2)


def run_all(listed: list[Launch], config: Config) -> Iterator[Launch]:
    """Run all launches, and yield each when it ends.

    When a launch ends, its next part begins, or the next launch. Tests that measure how soon a job ends come last and
    run alone.
    """
    timed = [launch for launch in listed if launch.name in TIMED.values()]
    others = longest_first([launch for launch in listed if launch not in timed], config.tier)

    def run_one(launch: Launch) -> list[Launch]:
        if STOP.is_set():
            return []
        if is_over():
            print(f"{launch.title}: {launch.not_run or 'all'} tests not begun, as no time was left", flush=True)
            return []
        print(f"{launch.title} ...", flush=True)
        run(launch, config.stall)
        part = launch.next_part()
        return [launch, *(run_one(part) if part is not None else [])]

    for together, workers in ((others, lanes()), (timed, 1)):
        if not together:
            continue
        os.environ[speed.VARIABLE] = f"{max(speed.slowdown(), speed.measure()):.2f}"  # the load may have increased
        print(f"slowdown of this machine: {speed.slowdown():.2f}", flush=True)
        with ThreadPoolExecutor(workers) as pool:
            running = [pool.submit(run_one, launch) for launch in together]
            for done in as_completed(running):
                yield from done.result()


def to_files(pytest: list[str], rank_variable: str, files: Sequence[str] = ("tests/parallel",)) -> list[str]:
    """Return the command of one rank, with its output in a separate file: on one terminal lines would interleave."""
    command = shlex.join([*pytest, f"--at-most={AT_MOST}", *files])
    return ["sh", "-c", f'exec {command} > "$HVDKIT_TEST_RECORDS/rank-${rank_variable}.out" 2>&1']


def run(launch: Launch, stall: float) -> None:
    """Run one launch until it ends, or until no test ends for ``stall`` seconds."""
    launch.folder.mkdir(parents=True)
    env = {**os.environ, **PERMISSIONS, "HVDKIT_TEST_RECORDS": str(launch.folder), "TF_CPP_MIN_LOG_LEVEL": "2"}
    env["HVDKIT_TEST_STALL"] = f"{stall:g}"
    if launch.begun is not None:
        env[BEGUN] = str(launch.begun)
    # Several launches run at a time, more ranks than cores: Horovod's threads, which look for tensors this often, would
    # take a tenth of the cores' time.
    env.setdefault("HOROVOD_CYCLE_TIME", "2")
    # A rank that waits for a core must not look dead.
    env.setdefault("HVDKIT_HEARTBEAT_SECONDS", speed.scaled(10))
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    started = time.monotonic()
    with (launch.folder / "launcher.out").open("w") as out:
        process = subprocess.Popen(launch.command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            launch.exit_code = wait(process, launch.folder, stall)
            launch.interrupted = launch.exit_code is None and STOP.is_set()
            launch.stalled = stall if launch.exit_code is None and not launch.interrupted else None
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
    """End all launches, so that the run ends with what it knows by then; the second time, exit at once."""
    if STOP.is_set():
        raise KeyboardInterrupt
    STOP.set()


def main() -> int:
    """Run all launches; return the exit code."""
    # A shell starts background jobs with SIGINT ignored and children inherit this, but some tests send SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    config = tyro.cli(Config, description=__doc__)
    if config.limit is not None:
        os.environ[UNTIL] = str(time.time() + config.limit)
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-tests-"))
    ended: list[Launch] = []
    failures = []
    try:
        for launch in run_all(launches(config, folder), config):
            ended.append(launch)
            print(f"{launch.title:12} {launch.summary()}", flush=True)
            text = report(launch)
            if text:
                print(text, flush=True)
            failures += [f"{test} [{launch.title}] - {reason(details)}" for test, details in launch.failures.items()]
    finally:
        if config.keep:
            print(f"every rank's output is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    passed = sum(len(launch.passed) for launch in ended)
    if not passed and not failures and not is_over() and not STOP.is_set():
        print("no test ran; is -k right?")
    else:
        print(slowest(ended, SHOWN))
    write_seconds(config, ended)
    for failure in failures:  # again at the end: users read the last lines first
        print(f"FAILED {failure}")
    if STOP.is_set():
        print("interrupted: other tests were not run")
    print(f"{passed} passed, {len(failures)} failed")
    if STOP.is_set():
        return 130
    return 0 if (passed or is_over()) and not failures else 1


def write_seconds(config: Config, ended: list[Launch]) -> None:
    """Write the seconds of launches and tests, as --seconds and --record ask for."""
    if config.seconds is not None:
        config.seconds.parent.mkdir(parents=True, exist_ok=True)
        config.seconds.write_text(json.dumps({launch.title: launch.record() for launch in ended}, indent=1))
    if config.record:
        recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        seconds: dict[str, float] = {}
        for launch in ended:
            seconds[launch.name] = seconds.get(launch.name, 0.0) + launch.seconds
        recorded[config.tier] = {name: round(total) for name, total in seconds.items()}
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
