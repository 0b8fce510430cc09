"""The results of ``hvdkit bench``, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from hvdkit._version import __version__
from hvdkit.machine.terminal import is_terminal

if TYPE_CHECKING:
    from hvdkit.commands.bench.config import Bench
    from hvdkit.commands.bench.worker import RankResult

FORMAT_VERSION = 1
# If the ratio of the quartiles is larger, other load on the machine affects the result.
MAX_QUARTILE_RATIO = 1.25
# Width of the table in characters if the output is not a terminal.
TABLE_WIDTH = 100


@dataclass(frozen=True)
class JobResult:
    """The results of one job.

    Attributes:
        ranks: number of ranks.
        batch: examples per step on each rank.
        results: every rank's results, in rank order.
    """

    ranks: int
    batch: int
    results: tuple[RankResult, ...]

    @property
    def milliseconds(self) -> list[float]:
        """Each step's time on the slowest rank."""
        return [1000 * max(times) for times in zip(*(result.seconds for result in self.results), strict=True)]

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
        return self.results[0].threads

    @property
    def memory(self) -> int:
        """The maximum memory of a rank, in bytes."""
        return max(result.memory for result in self.results)


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


def merge_jobs(jobs: Sequence[JobResult]) -> JobResult:
    """Merge the steps of several jobs on the same number of ranks."""
    results = [
        replace(
            results[0],
            seconds=[second for result in results for second in result.seconds],
            memory=max(result.memory for result in results),
        )
        for results in zip(*(job.results for job in jobs), strict=True)
    ]
    return replace(jobs[0], results=tuple(results))


def merge_rounds(rounds: Sequence[Round]) -> tuple[list[JobResult], float | None]:
    """Return the results on all ranks and on a single rank (if any), and the median of the rounds' efficiencies."""
    alone = [one.alone for one in rounds if one.alone is not None]
    efficiencies = [one.efficiency for one in rounds if one.efficiency is not None]
    jobs = [merge_jobs([one.all for one in rounds]), *([merge_jobs(alone)] if alone else [])]
    return jobs, statistics.median(efficiencies) if efficiencies else None


def show(config: Bench, rounds: Sequence[Round], stream: TextIO) -> None:
    """Print the table."""
    jobs, efficiency = merge_rounds(rounds)
    console = Console(file=stream, highlight=False, force_terminal=is_terminal(stream))
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    first = jobs[0].results[0]
    threads = f", {first.threads} threads" if first.threads > 1 else ", 1 thread" if first.threads else ""
    shown = f"{len(rounds)} times {config.steps}" if len(rounds) > 1 else str(config.steps)
    about = f"{config.model}, {config.batch_size} examples per rank, {config.optimizer_name}"
    console.print(f"{about}, {first.device}{threads} per rank; {shown} steps after {config.warm_up}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = ("ranks", "ms/step", "quartiles", "examples/s", "efficiency", "collectives", "MB sent", "MB per rank")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for job in jobs:
        low, high = job.quartiles
        busiest = max(job.results, key=lambda result: result.sent)
        table.add_row(
            str(job.ranks),
            f"{job.median:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{job.examples_per_second:.0f}",
            f"{100 * efficiency:.0f} %" if efficiency is not None and job.ranks > 1 else "",
            str(busiest.collectives) if job.ranks > 1 else "",
            f"{busiest.sent / 1e6:.1f}" if job.ranks > 1 else "",
            f"{job.memory / 1e6:.0f}",
        )
    console.print(table)
    low, high = max((job.quartiles for job in jobs), key=lambda pair: pair[1] / pair[0])
    if high > MAX_QUARTILE_RATIO * low:
        console.print("step times vary a lot: other programs run on these machines, and the figures are imprecise")


def as_json(config: Bench, rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the results for JSON; docs/profiling.md documents the keys."""
    jobs, efficiency = merge_rounds(rounds)
    return {
        "format_version": FORMAT_VERSION,
        "hvdkit": __version__,
        "model": config.model,
        "batch": config.batch_size,
        "optimizer": config.optimizer_name,
        "rounds": len(rounds),
        "scaling_efficiency": efficiency,
        "runs": [
            {
                "ranks": job.ranks,
                "threads": job.threads,
                "ms_per_step": job.median,
                "quartiles_ms": job.quartiles,
                "examples_per_second": job.examples_per_second,
                "collectives": max(result.collectives for result in job.results),
                "bytes": [result.sent for result in job.results],
                "memory": [result.memory for result in job.results],
                "step_ms": [[1000 * second for second in result.seconds] for result in job.results],
            }
            for job in jobs
        ],
    }
