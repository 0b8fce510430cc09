"""The results of ``hvdkit bench``, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdkit._version import __version__
from hvdkit.commands.measure.measurements import RankMeasurement, round_seconds, slowest_steps
from hvdkit.machine.terminal import aligned

if TYPE_CHECKING:
    from hvdkit.commands.measure.config import Bench

FORMAT_VERSION = 1
# If the ratio of the quartiles is larger, other load on the machine affects the result.
MAX_QUARTILE_RATIO = 1.25
_NAMES = ("ranks", "ms/step", "quartiles", "examples/s", "efficiency", "collectives", "MB sent", "MB per rank")


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


def as_table(config: Bench, jobs: Sequence[Sequence[RankMeasurement]]) -> str:
    """Return the table of the job on all ranks and, if measured, of that on a single rank."""
    efficiency = efficiency_of(jobs)
    first = jobs[0][0]
    threads = f", {first.threads} threads" if first.threads > 1 else ", 1 thread" if first.threads else ""
    shown = f"{config.rounds} times {config.steps}" if config.rounds > 1 else str(config.steps)
    about = f"{config.model}, {config.batch_size} examples per rank, {config.optimizer_name}"
    head = f"{about}, {first.device}{threads} per rank; {shown} steps after {config.warm_up}"
    rows: list[tuple[str, ...]] = [_NAMES]
    for ranks in jobs:
        times = milliseconds(ranks)
        low, high = quartiles(times)
        busiest = max(ranks, key=lambda rank: rank.sent)
        is_alone = len(ranks) == 1
        row = (
            str(len(ranks)),
            f"{statistics.median(times):.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{examples_per_second(config, ranks):.0f}",
            "" if is_alone or efficiency is None else f"{100 * efficiency:.0f} %",
            "" if is_alone else str(busiest.collectives),
            "" if is_alone else f"{busiest.sent / 1e6:.1f}",
            f"{max(rank.memory for rank in ranks) / 1e6:.0f}",
        )
        rows.append(row)
    lines = [head, *aligned(rows, right=range(len(_NAMES)))]
    low, high = max((quartiles(milliseconds(ranks)) for ranks in jobs), key=lambda pair: pair[1] / pair[0])
    if high > MAX_QUARTILE_RATIO * low:
        lines.append("step times vary a lot: other programs run on these machines, and the figures are imprecise")
    return "\n".join(lines)


def as_json(config: Bench, jobs: Sequence[Sequence[RankMeasurement]]) -> dict[str, object]:
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
