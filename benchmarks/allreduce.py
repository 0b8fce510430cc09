"""Time the allreduce alone, from 4 bytes to 64 MB, on two ranks of one machine.

python benchmarks/allreduce.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from figures import Metric
from harness import Benchmark, Case, Config, Variant, main
from processes import environment, horovodrun, launch, slowest, worker

VARIANTS = {
    "hvdkit": ("hvdkit, in a graph", "graph"),
    "eager": ("hvdkit, eager", "eager"),
    "horovod": ("raw Horovod, in a graph", "horovod"),
    "mpi4py": ("mpi4py, `Allreduce`", "mpi4py"),
    "memcpy": ("a copy within each rank", "memcpy"),
}
SIZES = {4: "4 B", 2**10: "1 KB", 2**14: "16 KB", 2**18: "256 KB", 2**20: "1 MB", 2**22: "4 MB", 2**24: "16 MB"}
SIZES |= {2**26: "64 MB"}


@dataclass(frozen=True, kw_only=True)
class Allreduce(Config):
    """Measure the allreduce alone."""

    np: int = 2
    """Number of ranks."""
    rounds: int = 3
    """Number of rounds; every variant runs once per round."""


def cases(config: Allreduce) -> list[Case]:
    """Return the single case."""
    sizes = list(SIZES)[:3] if config.quick else list(SIZES)
    variants = [
        Variant(name=name, title=title, run=partial(run, word, config, sizes))
        for name, (title, word) in VARIANTS.items()
    ]
    metrics = [Metric(name=f"us_{size}", title=f"{SIZES[size]}, µs", digits=None, at=size) for size in sizes]
    metrics.append(Metric(name="gbs", title=f"{SIZES[sizes[-1]]}, GB/s", digits=2))
    return [Case(name="sizes", title=f"{config.np} ranks of one machine", variants=variants, metrics=metrics)]


def run(word: str, config: Allreduce, sizes: list[int], folder: Path) -> dict[str, float]:
    """Run one variant once; return the slowest rank's microseconds by size, and GB/s of the largest size."""
    program = worker("allreduce.py", word, "--folder", folder, "--processes", config.np, "--sizes", *sizes)
    launch([horovodrun(config.np, program)], env=environment(), timeout=300)
    figures = slowest(folder)
    return figures | {"gbs": sizes[-1] / figures[f"us_{sizes[-1]}"] / 1000}


BENCHMARK = Benchmark(
    name="allreduce",
    title="The allreduce alone",
    about="""Float32 sums over two ranks of one machine, through shared memory, under plain horovodrun, called back to
    back. GB/s is the size of the message divided by the time. mpi4py and the copy run without a framework, and without
    negotiating which tensors are ready.""",
    cases=cases,
    config=Allreduce,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
