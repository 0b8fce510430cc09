"""How long a failure lasts, and what looking out for it costs.

    python benchmarks/failure.py                    # one host and three, every launcher: some 10 minutes
    python benchmarks/failure.py --faults "kill -9" SIGSTOP --no-hosts

For each fault and launcher: seconds from the fault until no process of the job is left, the launcher's exit code, and
hvdkit's last line. Then the watchdog's cost: microseconds of a step that does nothing but 20 eager exchanges, with the
watchdog and without.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cluster")]

import slurm as under_slurm  # noqa: E402
from hosts import Hosts, missing  # noqa: E402
from jobs import MPI  # noqa: E402
from jobs import run as run_code  # noqa: E402
from jobs_that_fail import LAUNCHERS, Ending, NoMemoryGroup, run  # noqa: E402

EXCHANGES = 20
STEP = f"""
import time
import hvdkit as hk
cluster = hk.init()
hk.barrier()
times = []
for _ in range(300):
    started = time.perf_counter()
    for _ in range({EXCHANGES}):
        hk.barrier()
    times.append(time.perf_counter() - started)
if cluster.is_chief:
    print("step " + str(sorted(times)[len(times) // 2] * 1e6))
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Measure failures."""

    faults: tuple[str, ...] = (
        "raise",
        "thread",
        "sys.exit(3)",
        "sys.exit(0)",
        "os._exit(0)",
        "kill -9",
        "out of memory",
        "SIGSTOP",
    )
    """Faults of one rank of three; see tests/cluster/faulty.py."""
    launchers: tuple[str, ...] = tuple(LAUNCHERS)
    """Which launchers."""
    hosts: bool = True
    """Also three hosts in network namespaces, one of which is cut off, or dies."""
    slurm: bool = True
    """Also under a Slurm of three hosts, where it is installed."""
    overhead: bool = True
    """Also the watchdog's cost."""


def row(fault: str, launcher: str, ending: Ending) -> str:
    """Return one row of the table."""
    left = f"; left: {len(ending.left)}" if ending.left else ""
    return f"| {fault} | {launcher} | {ending.seconds:.1f} | {ending.code}{left} | `{ending.last}` |"


def overhead(repeats: int = 3) -> str:
    """Return a line with the median step with the watchdog and without, by turns."""
    found: dict[str, list[float]] = {"0": [], "10": []}
    for _ in range(repeats):
        for heartbeat, steps in found.items():
            output = run_code(STEP, MPI, 2, HVDKIT_HEARTBEAT_SECONDS=heartbeat).output
            steps.append(float(re.search(r"step ([\d.]+)", output)[1]))  # type: ignore[index]
    without, watched = (statistics.median(steps) for steps in found.values())
    return f"a step of {EXCHANGES} eager exchanges, 2 ranks: {watched:.0f} us with the watchdog, {without:.0f} without"


def slurm_rows(faults: tuple[str, ...]) -> Iterator[str]:
    """Run all faults under Slurm, and return the rows; hosts are lost last, each time with a new Slurm."""
    for launcher in under_slurm.LAUNCHERS:
        with Hosts(3) as hosts, under_slurm.Slurm(hosts) as slurm:
            for fault in faults:
                yield row(fault, f"Slurm: {launcher}", under_slurm.run(fault, launcher, slurm))
        for fault in ("host cut off", "host dies"):
            with Hosts(3) as hosts, under_slurm.Slurm(hosts) as slurm:
                act = hosts[1].cut if fault == "host cut off" else hosts[1].kill
                yield row(fault, f"Slurm: {launcher}", under_slurm.run("wait", launcher, slurm, act=act))


def main() -> None:
    """Print the table, row by row."""
    config = tyro.cli(Config, description=__doc__)
    print("| fault | launcher | seconds | exit code | last line |\n|---|---|---|---|---|")
    for fault in config.faults:
        for launcher in config.launchers:
            with contextlib.suppress(NoMemoryGroup):
                print(row(fault, launcher, run(fault, launcher, ranks=3)), flush=True)
    if config.hosts and missing() is None:
        for launcher in config.launchers:
            for fault in ("host cut off", "host dies"):
                with Hosts(3) as hosts:
                    act = hosts[1].cut if fault == "host cut off" else hosts[1].kill
                    print(row(fault, launcher, run("wait", launcher, ranks=3, hosts=hosts, act=act)), flush=True)
    if config.slurm and under_slurm.missing() is None:
        for line in slurm_rows(tuple(fault for fault in config.faults if fault != "out of memory")):
            print(line, flush=True)
    if config.overhead:
        print(overhead())


if __name__ == "__main__":
    main()
