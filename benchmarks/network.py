"""Simulated hosts on this machine (tests/helpers/hosts.py) with links of limited bandwidth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from helpers.hosts import Host, Hosts, missing  # noqa: E402
from helpers.jobs_that_fail import across  # noqa: E402
from processes import BIN  # noqa: E402

RATES = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}  # titles of tc's rates


def limit(hosts: Iterable[Host], rate: str) -> None:
    """Limit each host's link to a rate in the format of tc."""
    for host in hosts:
        host.slow_down(rate, burst="256kb", latency="50ms")


def mpirun(hosts: Sequence[Host], env: Mapping[str, str]) -> list[str]:
    """Return the command of a plain mpirun on the first host that starts one rank on each host; append the program."""
    options = across("mpirun", ",".join(f"{host.address}:1" for host in hosts), env)
    return [*hosts[0].enter, str(BIN / "mpirun"), "--bind-to", "none", "-np", str(len(hosts)), *options]


def on_hosts(name: str, count: int, run: Callable[[Hosts], int]) -> int:
    """Return the exit code of ``run`` on ``count`` hosts; 0 with a message if this machine cannot simulate hosts."""
    if (why := missing()) is not None:
        print(f"{name}: not measured, cannot simulate hosts on this machine: {why}", file=sys.stderr)
        return 0
    with Hosts(count) as hosts:
        return run(hosts)
