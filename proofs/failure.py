"""Measure how long a failed job takes to end, and what the watchdog costs.

    python proofs/failure.py                    # one host and three, every launcher: about 10 minutes
    python proofs/failure.py --faults "kill -9" SIGSTOP --no-hosts

For each fault and launcher: seconds from the fault until no process of the job is left, and the launcher's exit code.
Then the watchdog's cost: microseconds for a step of 20 eager exchanges, with and without the watchdog.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import paths  # noqa: F401  (before modules of the folders that it adds)
import tyro
from figures import Sheet
from harness import Output, publish
from helpers import slurm as under_slurm
from helpers.hosts import Hosts, missing
from helpers.jobs import MPI
from helpers.jobs import run as run_code
from helpers.jobs_that_fail import LAUNCHERS, Ending, NoMemoryGroup, run

ABOUT = """One of three ranks fails, or one of three hosts (network namespaces) is cut off or dies. The table shows the
seconds from the fault until no process of the job is left, and the launcher's exit code."""
EXCHANGES = 20
STEP = f"""
import statistics, time
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
    print("step " + str(statistics.median(times) * 1e6))
"""


@dataclass(frozen=True, kw_only=True)
class Config(Output):
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
    """Faults injected into one of three ranks; see tests/jobs/faulty.py."""
    launchers: tuple[str, ...] = tuple(LAUNCHERS)
    """Launchers to use."""
    hosts: bool = True
    """Also run three hosts in network namespaces, one of which is cut off or dies."""
    slurm: bool = True
    """Also run under Slurm on three hosts, if it is installed."""
    overhead: bool = True
    """Also measure the watchdog's cost."""


Endings = Iterator[tuple[str, str, Ending]]  # fault, launcher, how the job ended


def overhead(repeats: int = 3) -> str:
    """Return a line with the median step with and without the watchdog, measured alternately."""
    found: dict[str, list[float]] = {"0": [], "10": []}
    for _ in range(repeats):
        for heartbeat, steps in found.items():
            output = run_code(STEP, MPI, 2, HVDKIT_HEARTBEAT_SECONDS=heartbeat).output
            steps.append(float(re.search(r"step ([\d.]+)", output)[1]))  # type: ignore[index]
    without, watched = (statistics.median(steps) for steps in found.values())
    return f"a step of {EXCHANGES} eager exchanges, 2 ranks: {watched:.0f} us with the watchdog, {without:.0f} without"


def on_one_host(config: Config) -> Endings:
    """Run all faults of one rank of three under every launcher."""
    for fault in config.faults:
        for launcher in config.launchers:
            with contextlib.suppress(NoMemoryGroup):
                yield fault, launcher, run(fault, launcher, ranks=3)


def on_three_hosts(config: Config) -> Endings:
    """Lose one of three hosts under every launcher."""
    for launcher in config.launchers:
        for fault in ("host cut off", "host dies"):
            with Hosts(3) as hosts:
                act = hosts[1].cut if fault == "host cut off" else hosts[1].kill
                yield fault, launcher, run("wait", launcher, ranks=3, hosts=hosts, act=act)


def on_slurm(config: Config) -> Endings:
    """Run all faults under Slurm; host losses are last, each with a new Slurm."""
    for launcher in under_slurm.LAUNCHERS:
        with Hosts(3) as hosts, under_slurm.Slurm(hosts) as slurm:
            for fault in config.faults:
                if fault != "out of memory":
                    yield fault, f"Slurm: {launcher}", under_slurm.run(fault, launcher, slurm)
        for fault in ("host cut off", "host dies"):
            with Hosts(3) as hosts, under_slurm.Slurm(hosts) as slurm:
                act = hosts[1].cut if fault == "host cut off" else hosts[1].kill
                yield fault, f"Slurm: {launcher}", under_slurm.run("wait", launcher, slurm, act=act)


def main() -> int:
    """Run the selected faults, and record a table of faults and launchers."""
    config = tyro.cli(Config, description=__doc__)
    parts = [on_one_host(config)]
    if config.hosts and missing() is None:
        parts.append(on_three_hosts(config))
    if config.slurm and under_slurm.missing() is None:
        parts.append(on_slurm(config))
    table: dict[str, dict[str, str]] = {}
    for fault, launcher, ending in itertools.chain(*parts):
        left = f", {len(ending.left)} left" if ending.left else ""
        table.setdefault(fault, {})[launcher] = f"{ending.seconds:.1f} / {ending.code}{left}"
        print(f"{fault}, {launcher}: {ending.seconds:.1f} s, {ending.code}{left}: {ending.last}", file=sys.stderr)
    launchers = list(dict.fromkeys(launcher for row in table.values() for launcher in row))
    rows = [[fault, *(row.get(launcher, "") for launcher in launchers)] for fault, row in table.items()]
    return publish(
        "failure",
        "Failures",
        ABOUT,
        config,
        folder="proofs",
        sheets=[Sheet(title="seconds / exit code", header=["fault", *launchers], rows=rows)],
        notes=[overhead()] if config.overhead else [],
    )


if __name__ == "__main__":
    sys.exit(main())
