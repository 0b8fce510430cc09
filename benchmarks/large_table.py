"""Train a table that is too large for a single rank, and check rows of it against a formula.

python benchmarks/large_table.py        # 8 GB: 31,250,000 x 64 float32 over four ranks; Adagrad adds 8 GB of slots
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from figures import Metric
from harness import Benchmark, Case, Config, Variant, main
from processes import environment, launch, ranks, slowest, worker

METRICS = (
    Metric(name="ms", title="ms/step", digits=0),
    Metric(name="made", title="seconds to create it", digits=1),
    Metric(name="held", title="GiB per rank", digits=2),
    Metric(name="peak", title="peak GiB per rank", digits=2),
)


@dataclass(frozen=True, kw_only=True)
class LargeTable(Config):
    """Train a large table."""

    rounds: int = 1
    """Number of rounds."""
    rows: int = 31_250_000
    """Number of rows of 64 float32: 8 GB."""
    np: int = 4
    """Number of ranks."""
    steps: int = 20
    """Number of timed steps."""


def cases(config: LargeTable) -> list[Case]:
    """Return the single case."""
    names = {"sgd": "SGD", "adagrad": "Adagrad, with slots of the same size"}
    variants = [Variant(name=name, title=title, run=partial(run, name, config)) for name, title in names.items()]
    title = f"{config.rows:,} x 64 float32 over {config.np} ranks"
    return [Case(name="table", title=title, variants=variants, metrics=METRICS)]


def run(optimizer: str, config: LargeTable, folder: Path) -> dict[str, float]:
    """Train once; return the maximum of every figure over the ranks."""
    rows, steps = (config.rows // 100, 3) if config.quick else (config.rows, config.steps)
    program = worker("large_table.py", "--folder", folder, "--rows", rows, "--steps", steps, "--optimizer", optimizer)
    launch([ranks(config.np, program)], env=environment(threads=None), timeout=600)
    return slowest(folder)


BENCHMARK = Benchmark(
    name="large_table",
    title="A table of 8 GB",
    about="""31,250,000 x 64 float32 over four ranks of one machine, 4,096 x 26 uniform ids per rank and step. The
    worker compares one row, which all ranks look up, with a formula, and some rows that no rank looks up with their
    initial values.""",
    cases=cases,
    config=LargeTable,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
