"""The results of ``hvdkit bench``, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from hvdkit._version import __version__

if TYPE_CHECKING:
    from hvdkit.commands.bench.config import Bench
    from hvdkit.commands.bench.worker import RankResult

FORMAT_VERSION = 1
# If the ratio of the quartiles is larger, other load on the machine affects the result.
UNSTEADY = 1.25
# Width of the table in characters if the output is not a terminal.
NARROWEST = 100


@dataclass(frozen=True)
class JobResult:
    """The results of one job.

    Attributes:
        ranks: number of ranks.
        batch: examples per step on each rank.
        each: every rank's results, in rank order.
    """

    ranks: int
    batch: int
    each: tuple[RankResult, ...]

    @property
    def milliseconds(self) -> list[float]:
        """Each step's time on the slowest rank."""
        return [1000 * max(times) for times in zip(*(one.seconds for one in self.each), strict=True)]

    @property
    def median(self) -> float:
        """The median of :attr:`milliseconds`."""
        return statistics.median(self.milliseconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile of :attr:`milliseconds`."""
        times = self.milliseconds
        if len(times) < 2:
            return times[0], times[0]
        first, _, third = statistics.quantiles(times, n=4, method="inclusive")
        return first, third

    @property
    def examples_per_second(self) -> float:
        """Throughput over all ranks."""
        return 1000 * self.ranks * self.batch / self.median

    @property
    def threads(self) -> int:
        """Compute threads per rank."""
        return self.each[0].threads

    @property
    def memory(self) -> int:
        """The maximum memory of a rank, in bytes."""
        return max(one.memory for one in self.each)


@dataclass(frozen=True)
class Round:
    """Consecutive jobs on all ranks and, optionally, on a single rank."""

    all: JobResult
    alone: JobResult | None = None

    @property
    def efficiency(self) -> float | None:
        """Throughput per rank relative to a single rank.

        Both use the same number of examples and threads per rank ("weak scaling").
        """
        return None if self.alone is None else self.alone.median / self.all.median


def joined(runs: Sequence[JobResult]) -> JobResult:
    """Merge the steps of all rounds into one run."""
    each = [
        replace(
            ranks[0],
            seconds=[second for one in ranks for second in one.seconds],
            memory=max(one.memory for one in ranks),
        )
        for ranks in zip(*(run.each for run in runs), strict=True)
    ]
    return replace(runs[0], each=tuple(each))


def both(rounds: Sequence[Round]) -> tuple[list[JobResult], float | None]:
    """Return the runs on all ranks and on a single rank (if any), and the median of the rounds' efficiencies."""
    alone = [one.alone for one in rounds if one.alone is not None]
    shares = [one.efficiency for one in rounds if one.efficiency is not None]
    runs = [joined([one.all for one in rounds]), *([joined(alone)] if alone else [])]
    return runs, statistics.median(shares) if shares else None


def show(config: Bench, rounds: Sequence[Round], stream: TextIO) -> None:
    """Print the table."""
    runs, share = both(rounds)
    console = Console(file=stream, highlight=False)
    if not stream.isatty():
        console.width = NARROWEST
    first = runs[0].each[0]
    threads = f", {first.threads} threads" if first.threads > 1 else ", 1 thread" if first.threads else ""
    shown = f"{len(rounds)} times {config.steps}" if len(rounds) > 1 else str(config.steps)
    about = f"{config.model}, {config.batch_size} examples a rank, {config.optimizer_name}"
    console.print(f"{about}, {first.device}{threads} a rank; {shown} steps after {config.warm_up}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = ("ranks", "ms/step", "quartiles", "examples/s", "efficiency", "collectives", "MB sent", "MB a rank")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
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


def as_json(config: Bench, rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the results for JSON; docs/profiling.md documents the keys."""
    runs, share = both(rounds)
    return {
        "format_version": FORMAT_VERSION,
        "hvdkit": __version__,
        "model": config.model,
        "batch": config.batch_size,
        "optimizer": config.optimizer_name,
        "rounds": len(rounds),
        "scaling_efficiency": share,
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
