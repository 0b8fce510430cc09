"""Compare variants of averaging gradients between hosts with limited links: hvdkit, a central rank, a parameter server,
and the lower bound of any allreduce.

python benchmarks/ring.py          # about 20 minutes; needs root, iproute2, openssh-server
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from figures import Goal, Metric
from harness import Benchmark, Case, Config, Variant, main
from network import RATES, ROOT, Host, Hosts, limit, mpirun, on_hosts
from processes import environment, launch, slowest, worker

from hvdkit.commands.measure.planning import bits_of

MB = 1_000_000
SMALL = (4096, 65536)
SMALL_MESSAGES = "small messages, compared with Open MPI's choice"
VARIANTS = {
    "hvdkit": "hvdkit",
    "fp16": 'hvdkit, `compression="fp16"`',
    "own": "hvdkit, with Open MPI's choice of algorithm",
    "horovod": "raw Horovod",
    "central": "gathered, averaged and sent back by one rank",
    "ps": "ParameterServerStrategy, server on a separate host",
    "bound": "2 (N-1)/N S / bandwidth",
}
PORT = 2222
MOST = 4  # hosts with ranks; one more host runs a server


@dataclass(frozen=True, kw_only=True)
class Ring(Config):
    """Average gradients between hosts."""

    rates: tuple[str, ...] = tuple(RATES)
    """Bandwidths of each host's link, in the format of tc."""
    np: tuple[int, ...] = (2, 4)
    """Numbers of hosts, with one rank on each."""
    rounds: int = 3
    """Number of rounds; every variant runs once per round."""
    steps: int = 7
    """Timed averages per run and size; the figure is their median on the slowest rank."""


def sizes_at(rate: str) -> tuple[int, ...]:
    """Return the gradient sizes in bytes: small ones show the latency; 100 MB would take too long at 200 Mbit/s."""
    return (*SMALL, 25 * MB, 100 * MB) if rate == "1gbit" else (*SMALL, 25 * MB)


def cases(hosts: Hosts, config: Ring) -> list[Case]:
    """Return a case for each bandwidth and number of hosts."""
    return [case(hosts, rate, size, config) for rate in config.rates for size in config.np]


def case(hosts: Hosts, rate: str, count: int, config: Ring) -> Case:
    """Return all variants on ``count`` hosts."""
    sizes, steps = sizes_at(rate), 2 if config.quick else config.steps
    run = partial(run_variant, hosts=hosts, rate=rate, count=count, sizes=sizes, steps=steps)
    large = [size for size in sizes if size > MB]
    return Case(
        name=f"{rate}-{count}",
        title=f"{count} hosts, {RATES.get(rate, rate)} each",
        variants=[Variant(name=name, title=title, run=partial(run, name)) for name, title in VARIANTS.items()],
        metrics=[
            *(Metric(name=f"ms_{size}", title=f"ms for {size // MB} MB", digits=0) for size in large),
            *(Metric(name=f"ms_{size}", title=f"ms for {size} bytes", digits=2) for size in SMALL),
        ],
        goals=[
            *(
                goal
                for size in large
                for goal in goals(size, f"{count} hosts, {RATES.get(rate, rate)}, {size // MB} MB")
            ),
            Goal(upper="hvdkit", lower="own", metric=f"ms_{SMALL[0]}", limit=1.1, about=SMALL_MESSAGES),
        ],
        reference="hvdkit",
    )


def goals(size: int, where: str) -> list[Goal]:
    """Return the goals relative to the bound."""
    metric = f"ms_{size}"
    return [
        Goal(upper="hvdkit", lower="bound", metric=metric, limit=1.15, headline=True, about=f"hvdkit / bound, {where}"),
        Goal(upper="fp16", lower="bound", metric=metric, limit=0.6, headline=True, about=f"fp16 / fp32 bound, {where}"),
    ]


def run_variant(
    variant: str, folder: Path, *, hosts: Hosts, rate: str, count: int, sizes: Sequence[int], steps: int
) -> dict[str, float]:
    """Run one variant once; return the slowest rank's milliseconds by size."""
    if variant == "bound":
        return {f"ms_{size}": 1000 * 2 * (count - 1) / count * size * 8 / bits_of(rate) for size in sizes}
    here = list(hosts)[:count]
    limit(hosts, rate)
    common = ["--folder", folder, "--steps", steps, "--processes", count, "--sizes", *sizes]
    # hvdkit does not tune a collective if the user has set one of its variables; this is the default value.
    extra = {"OMPI_MCA_coll_tuned_priority": "30"} if variant == "own" else {}
    env = environment(PYTHONPATH=str(ROOT), **extra)
    if variant == "ps":
        commands = server_processes(hosts[MOST], here, common)
    else:
        commands = [[*mpirun(here, env), *worker("ring.py", variant, *common)]]
    launch(commands, env=env, timeout=600)
    return slowest(folder)


def server_processes(server: Host, hosts: Sequence[Host], common: Sequence[object]) -> list[list[str]]:
    """Return the commands of server and coordinator, on one host, and of a worker on each of the others."""
    places = [(server, "ps", 0), (server, "chief", 0), *((host, "worker", i) for i, host in enumerate(hosts))]
    addresses = [f"{host.address}:{PORT + number}" for number, (host, *_) in enumerate(places)]
    program = worker("ring_ps.py", *common, "--addresses", *addresses)
    return [[*host.enter, *program, "--role", role, "--number", str(number)] for host, role, number in places]


def benchmark(hosts: Hosts) -> Benchmark:
    """Return the benchmark on these hosts."""
    return Benchmark(
        name="ring",
        title="Averaging between hosts",
        about="""Hosts are network namespaces of one machine, each with a link limited by `tc tbf`, of which TCP gets
        0.956. One rank per host with one compute thread, under plain `mpirun`; 25 and 100 MB of float32 gradients in 8
        tensors. The bound holds for any allreduce: every rank sends 2 (N-1)/N of its bytes. The step of a parameter
        server is the time in which all workers together read and update as many times as there are workers.""",
        cases=partial(cases, hosts),
        config=Ring,
    )


if __name__ == "__main__":
    sys.exit(on_hosts("ring", MOST + 1, lambda hosts: main(benchmark(hosts))))
