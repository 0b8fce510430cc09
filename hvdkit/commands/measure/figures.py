"""The results of ``hvdkit bench``, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from hvdkit._version import __version__
from hvdkit.commands.measure.measurements import RankMeasurement, round_seconds, slowest_steps
from hvdkit.machine.terminal import is_terminal

if TYPE_CHECKING:
    from hvdkit.commands.measure.config import Bench

FORMAT_VERSION = 1
# If the ratio of the quartiles is larger, other load on the machine affects the result.
MAX_QUARTILE_RATIO = 1.25
# Width of the table in characters if the output is not a terminal.
TABLE_WIDTH = 100


def milliseconds(ranks: Sequence[RankMeasurement]) -> list[float]:
    """Return each step's time on the slowest rank, of all rounds."""
    return [1000 * seconds for one_round in slowest_steps(ranks) for seconds in one_round]


def quartiles(times: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile."""
    if len(times) < 2:
        return times[0], times[0]
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return first, third


def examples_per_second(config: Bench, ranks: Sequence[RankMeasurement]) -> float:
    """Return the throughput over all ranks."""
    return 1000 * len(ranks) * config.batch_size / statistics.median(milliseconds(ranks))


def efficiency_of(jobs: Sequence[Sequence[RankMeasurement]]) -> float | None:
    """Return the throughput per rank relative to a single rank, the median over rounds; None if it was not measured.

    Both use the same number of examples and threads per rank ("weak scaling").
    """
    if len(jobs) < 2:
        return None
    together, alone = map(round_seconds, jobs)
    return statistics.median(one / several for one, several in zip(alone, together, strict=True))


def show(config: Bench, jobs: Sequence[Sequence[RankMeasurement]], stream: TextIO) -> None:
    """Print the table of the job on all ranks and, if measured, of that on a single rank."""
    efficiency = efficiency_of(jobs)
    console = Console(file=stream, highlight=False, force_terminal=is_terminal(stream))
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    first = jobs[0][0]
    threads = f", {first.threads} threads" if first.threads > 1 else ", 1 thread" if first.threads else ""
    shown = f"{config.rounds} times {config.steps}" if config.rounds > 1 else str(config.steps)
    about = f"{config.model}, {config.batch_size} examples per rank, {config.optimizer_name}"
    console.print(f"{about}, {first.device}{threads} per rank; {shown} steps after {config.warm_up}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = ("ranks", "ms/step", "quartiles", "examples/s", "efficiency", "collectives", "MB sent", "MB per rank")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for ranks in jobs:
        times = milliseconds(ranks)
        low, high = quartiles(times)
        busiest = max(ranks, key=lambda rank: rank.sent)
        is_alone = len(ranks) == 1
        table.add_row(
            str(len(ranks)),
            f"{statistics.median(times):.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{examples_per_second(config, ranks):.0f}",
            "" if is_alone or efficiency is None else f"{100 * efficiency:.0f} %",
            "" if is_alone else str(busiest.collectives),
            "" if is_alone else f"{busiest.sent / 1e6:.1f}",
            f"{max(rank.memory for rank in ranks) / 1e6:.0f}",
        )
    console.print(table)
    low, high = max((quartiles(milliseconds(ranks)) for ranks in jobs), key=lambda pair: pair[1] / pair[0])
    if high > MAX_QUARTILE_RATIO * low:
        console.print("step times vary a lot: other programs run on these machines, and the figures are imprecise")


def as_json(config: Bench, jobs: Sequence[Sequence[RankMeasurement]]) -> dict[str, Any]:
    """Return the results for JSON; docs/profiling.md documents the keys."""
    return {
        "format_version": FORMAT_VERSION,
        "hvdkit": __version__,
        "model": config.model,
        "batch": config.batch_size,
        "optimizer": config.optimizer_name,
        "rounds": config.rounds,
        "scaling_efficiency": efficiency_of(jobs),
        "runs": [
            {
                "ranks": len(ranks),
                "threads": ranks[0].threads,
                "ms_per_step": statistics.median(milliseconds(ranks)),
                "quartiles_ms": quartiles(milliseconds(ranks)),
                "examples_per_second": examples_per_second(config, ranks),
                "collectives": max(rank.collectives for rank in ranks),
                "bytes": [rank.sent for rank in ranks],
                "memory": [rank.memory for rank in ranks],
                "step_ms": [milliseconds([rank]) for rank in ranks],
            }
            for ranks in jobs
        ],
    }
