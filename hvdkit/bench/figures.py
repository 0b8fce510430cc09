"""What ``hvdkit bench`` has measured, for people and for machines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from hvdkit._version import __version__

if TYPE_CHECKING:
    from hvdkit.bench.config import Bench
    from hvdkit.bench.worker import RankResult

FORMAT_VERSION = 1
# Quartiles whose ratio is larger do not come from the step itself.
UNSTEADY = 1.25
# Columns that the table needs.
NARROWEST = 100


@dataclass(frozen=True)
class Run:
    """The figures of one job.

    Attributes:
        ranks: how many.
        batch: examples of one rank's step.
        each: every rank's figures, in rank order.
    """

    ranks: int
    batch: int
    each: tuple[RankResult, ...]

    @property
    def milliseconds(self) -> list[float]:
        """Each step's time on the rank where it took longest."""
        return [1000 * max(times) for times in zip(*(one.seconds for one in self.each), strict=True)]

    @property
    def median(self) -> float:
        """The median of these."""
        return statistics.median(self.milliseconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the steps took less than the first, a quarter more than the second."""
        times = self.milliseconds
        if len(times) < 2:
            return times[0], times[0]
        first, _, third = statistics.quantiles(times, n=4, method="inclusive")
        return first, third

    @property
    def examples_per_second(self) -> float:
        """Over all ranks."""
        return 1000 * self.ranks * self.batch / self.median

    @property
    def threads(self) -> int:
        """Threads that compute on each rank."""
        return self.each[0].threads

    @property
    def memory(self) -> int:
        """Bytes of the rank that uses most."""
        return max(one.memory for one in self.each)


def efficiency(runs: Sequence[Run]) -> float | None:
    """Return the examples per second and rank beside those of one rank alone; None where that was not timed.

    Both have the same examples a rank and the same threads a rank ("weak scaling").
    """
    alone = next((run for run in runs if run.ranks == 1), None)
    return None if alone is None or runs[0] is alone else alone.median / runs[0].median


def show(config: Bench, runs: Sequence[Run], stream: TextIO) -> None:
    """Print the table."""
    console = Console(file=stream, highlight=False)
    if not stream.isatty():
        console.width = NARROWEST
    first = runs[0].each[0]
    threads = f", {first.threads} threads" if first.threads > 1 else ", 1 thread" if first.threads else ""
    about = f"{config.model}, {config.batch_size} examples a rank, {config.optimizer_name}"
    console.print(f"{about}, {first.device}{threads} a rank; {config.steps} steps after {config.warm_up}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = ("ranks", "ms/step", "quartiles", "examples/s", "efficiency", "collectives", "MB sent", "MB a rank")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    share = efficiency(runs)
    for run in runs:
        low, high = run.quartiles
        busiest = max(run.each, key=lambda one: one.sent)
        table.add_row(
            str(run.ranks),
            f"{run.median:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{run.examples_per_second:.0f}",
            f"{100 * share:.0f} %" if share is not None and run.ranks > 1 else "",
            str(busiest.collectives) if run.ranks > 1 else "",
            f"{busiest.sent / 1e6:.1f}" if run.ranks > 1 else "",
            f"{run.memory / 1e6:.0f}",
        )
    console.print(table)
    low, high = max((run.quartiles for run in runs), key=lambda pair: pair[1] / pair[0])
    if high > UNSTEADY * low:
        console.print("steps differ by much: something else runs on these machines, and the figures are rough")


def as_json(config: Bench, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures for machines; docs/profiling.md names the keys."""
    return {
        "format_version": FORMAT_VERSION,
        "hvdkit": __version__,
        "model": config.model,
        "batch": config.batch_size,
        "optimizer": config.optimizer_name,
        "scaling_efficiency": efficiency(runs),
        "runs": [
            {
                "ranks": run.ranks,
                "threads": run.threads,
                "ms_per_step": run.median,
                "quartiles_ms": run.quartiles,
                "examples_per_second": run.examples_per_second,
                "collectives": max(one.collectives for one in run.each),
                "bytes": [one.sent for one in run.each],
                "memory": [one.memory for one in run.each],
                "step_ms": [[1000 * second for second in one.seconds] for one in run.each],
            }
            for run in runs
        ],
    }
