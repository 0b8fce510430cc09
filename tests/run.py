"""Run every test: in one process, then the same parallel files on 1 to 4 ranks under MPI, then under Gloo.

    python tests/run.py                          # everything
    python tests/run.py --np 2 3 --no-gloo -k optimizer
    python tests/run.py --single-only

One launch serves all tests of a number of ranks, since starting TensorFlow takes seconds. A test counts once per
launch, and as failed where it failed on any rank. The last line is "N passed, M failed".
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import psutil
import tyro

sys.path.insert(0, str(Path(__file__).parent))

from outcomes import Launch, report

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# As root, and with more ranks than cores: both are fine on one's own machine.
PERMISSIONS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
# Those of tests/cluster that look at how long a failure lasts, each by itself.
IN_TIME = ("test_hosts.py", "test_one_host.py")
# Under Gloo bytes travel by another way, and nothing else is different: these have every kind of exchange in them.
UNDER_GLOO = (
    "test_checkpoint.py",
    "test_cluster.py",
    "test_collectives.py",
    "test_divergence.py",
    "test_embedding_collection.py",
    "test_fit.py",
    "test_gradients.py",
    "test_graphs.py",
    "test_mismatch.py",
    "test_optimizer_traps.py",
    "test_partitioned_variable.py",
    "test_sparse_gradients.py",
    "test_supervisor.py",
    "test_variables.py",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Run hvdkit's tests."""

    np: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of ranks under MPI: one launch of tests/parallel for each."""
    gloo: bool = True
    """Launch those of tests/parallel that have every kind of exchange once more without MPI, by `horovodrun --gloo`."""
    gloo_np: int = 2
    """Number of ranks of the launch under Gloo."""
    single: bool = True
    """Run tests/single first."""
    single_only: bool = False
    """Run nothing but tests/single."""
    k: Annotated[str, tyro.conf.arg(aliases=["-k"])] = ""
    """Run only the tests that match this pytest expression."""
    faults: bool = True
    """Run tests/cluster: jobs that fail, on this host and on several in network namespaces."""
    timeout: float = 900.0
    """Seconds after which a launch is ended as hung."""
    keep: bool = False
    """Keep the folder with every rank's output, and say where it is."""


def program(name: str) -> str:
    """Return the program next to this Python, else the one on the path."""
    beside = BIN / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name}: not found next to {sys.executable} or on the path; run `make setup` first")
    return found


def launches(config: Config, folder: Path) -> list[Launch]:
    """Return all launches of this run, in their order."""
    pytest = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", *(["-k", config.k] if config.k else [])]
    listed = []
    if config.single or config.single_only:
        command = [*pytest, "--continue-on-collection-errors", "tests/single"]
        listed.append(Launch("one process", 1, command, folder / "single"))
    if config.single_only:
        return listed
    if config.faults:
        others = sorted({path.name for path in (ROOT / "tests" / "cluster").glob("test_*.py")} - set(IN_TIME))
        for name, files in (("faults", others), ("faults, hosts", IN_TIME[:1]), ("faults, here", IN_TIME[1:])):
            command = [*pytest, *(f"tests/cluster/{file}" for file in files)]
            listed.append(Launch(name, 1, command, folder / name.replace(", ", "-")))
    for n in config.np:
        mpirun = [program("mpirun"), "-np", str(n), "--bind-to", "none"]
        path = folder / f"mpi-{n}"
        listed.append(Launch(f"np={n}, MPI", n, [*mpirun, *to_files(pytest, path, "OMPI_COMM_WORLD_RANK")], path))
    if config.gloo:
        n, path = config.gloo_np, folder / f"gloo-{config.gloo_np}"
        horovodrun = [program("horovodrun"), "--gloo", "-np", str(n)]
        command = to_files(pytest, path, "HOROVOD_RANK", [f"tests/parallel/{name}" for name in UNDER_GLOO])
        listed.append(Launch(f"np={n}, Gloo", n, [*horovodrun, *command], path))
    return listed


def run_all(listed: list[Launch], timeout: float) -> Iterator[Launch]:
    """Run all launches, and yield each as it ends.

    The tests in one process often wait, and leave room for launches of one and two ranks beside them, faults for larger
    ones. Tests of how soon a job ends have the machine for themselves.
    """
    single = [launch for launch in listed if launch.name == "one process"]
    faults, hosts, here = ([x for x in listed if x.name == f"faults{part}"] for part in ("", ", hosts", ", here"))
    large = [launch for launch in listed if launch.size > 2]
    small = [launch for launch in listed if launch not in [*single, *faults, *hosts, *here, *large]]
    ended: SimpleQueue[Launch] = SimpleQueue()

    def one_after_another(lane: list[Launch]) -> None:
        for launch in lane:
            print(f"{launch.name} ...", flush=True)
            run(launch, timeout)
            ended.put(launch)

    for together in ([single, small], [large, faults], [hosts, here]):
        with ThreadPoolExecutor(len(together)) as pool:
            waiting = [pool.submit(one_after_another, lane) for lane in together]
            for _ in range(sum(map(len, together))):
                yield ended.get()
            for future in waiting:
                future.result()


def to_files(
    pytest: list[str], folder: Path, rank_variable: str, files: Sequence[str] = ("tests/parallel",)
) -> list[str]:
    """Return the command of one rank, its output in a file of its own: on one terminal the ranks' lines would tear."""
    command = shlex.join([*pytest, *files])
    return ["sh", "-c", f"exec {command} > {shlex.quote(str(folder))}/rank-${rank_variable}.out 2>&1"]


def run(launch: Launch, timeout: float) -> None:
    """Run one launch to its end, or end it after ``timeout`` seconds."""
    launch.folder.mkdir(parents=True)
    env = {**os.environ, **PERMISSIONS, "HVDKIT_TEST_RECORDS": str(launch.folder), "TF_CPP_MIN_LOG_LEVEL": "2"}
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    started = time.monotonic()
    with (launch.folder / "launcher.out").open("w") as out:
        process = subprocess.Popen(launch.command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            launch.exit_code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            launch.timed_out = timeout
        finally:
            end(process)
    launch.seconds = time.monotonic() - started
    launch.read()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and all its ranks, wherever they are: SIGTERM first, so that each rank writes its stacks."""
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


def main() -> int:
    """Run all launches; return the exit code."""
    # A shell starts background jobs with Ctrl-C ignored, which their children inherit; some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = tyro.cli(Config, description=__doc__)
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-tests-"))
    passed, failures = 0, []
    try:
        for launch in run_all(launches(config, folder), config.timeout):
            print(f"{launch.name:12} {launch.summary()}", flush=True)
            text = report(launch)
            if text:
                print(text, flush=True)
            passed += len(launch.passed)
            failures += [f"{test} [{launch.name}]" for test in launch.failures]
    finally:
        if config.keep:
            print(f"every rank's output is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if not passed and not failures:
        print("no test ran; is -k right?")
    for failure in failures:  # once more: the last lines are what people see first
        print(f"FAILED {failure}")
    print(f"{passed} passed, {len(failures)} failed")
    return 0 if passed and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
