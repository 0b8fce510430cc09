"""The text report of a profile: a table with a row per rank, and a summary sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from hvdkit.profiling.intervals import clip, total, union
from hvdkit.profiling.step_parts import PARTS, RankParts

FORMAT_VERSION = 1
# Minimum width of the table in characters.
NARROWEST = 100
# Waiting below this fraction of a step is not reported.
WORTH_A_WORD = 0.05
_NAMES = {"other": "Python (other)"}


@dataclass(frozen=True)
class Row:
    """One rank's mean step, in milliseconds.

    Attributes:
        rank, host: the rank and its host.
        steps: number of steps recorded.
        step: time of one step.
        parts: the time of each of :data:`PARTS`; they add up to ``step``.
        hidden: exchange that overlaps with compute; included in compute.
        waited_for: the longest time that another rank spent only waiting for this one.
        clock_error: maximum error of its times relative to rank 0's clock.
    """

    rank: int
    host: str
    steps: int
    step: float
    parts: dict[str, float]
    hidden: float
    waited_for: float
    clock_error: float


def rows(ranks: Sequence[RankParts]) -> list[Row]:
    """Return each rank's mean over its steps; ranks without recorded steps are omitted."""
    return [_row(one, ranks) for one in ranks if one.steps]


def _row(one: RankParts, ranks: Sequence[RankParts]) -> Row:
    count = sum(step.steps for step in one.steps)
    each = 1e6 * count
    parts = {name: sum(step.parts[name] for step in one.steps) / each for name in PARTS}
    start, end = one.steps[0].start, one.steps[-1].end
    blamed = [total(clip(union(other.blames.get(one.rank, [])), start, end)) for other in ranks]
    return Row(
        rank=one.rank,
        host=one.host,
        steps=count,
        step=(end - start) / each,
        parts=parts,
        hidden=sum(step.hidden for step in one.steps) / each,
        waited_for=max(blamed, default=0) / each,
        clock_error=one.clock_error / 1e6,
    )


def verdict(found: Sequence[Row]) -> str:
    """Return a one-line summary: the straggler and the reason, and other expensive parts.

    Example:
        >>> parts = {"compute": 50.0, "exchange": 4.0, "wait": 0.0, "input": 1.0, "save": 0.0, "other": 1.0}
        >>> slow = Row(1, "b", 10, 66.0, {**parts, "input": 11.0}, 1.0, 10.0, 0.0)
        >>> waiting = Row(0, "a", 10, 66.0, {**parts, "wait": 10.0}, 1.0, 0.0, 0.0)
        >>> print(verdict([waiting, slow]).replace("; ", "\\n"))
        rank 1 is the straggler: other ranks wait 10.0 of 66.0 ms per step
        its input takes 11.0 ms (others: 1.0)
        exchange: 4.0
    """
    if not found:
        return "no step was recorded"
    step = sum(row.step for row in found) / len(found)
    # A rank that is late because it waited for a rank in another group of the mesh is not the straggler.
    slow = max(found, key=lambda row: row.waited_for - row.parts["wait"])
    exchange = sum(row.parts["exchange"] for row in found) / len(found)
    means = {name: sum(row.parts[name] for row in found) / len(found) for name in PARTS}
    if len(found) > 1 and slow.waited_for >= WORTH_A_WORD * step:
        others = sorted((row for row in found if row is not slow), key=lambda row: -row.waited_for)
        usual = {name: sum(row.parts[name] for row in others) / len(others) for name in PARTS}
        more = {name: slow.parts[name] - usual[name] for name in PARTS if name != "wait"}
        why = sorted(more, key=lambda name: -more[name])
        reasons = [
            f"its {_NAMES.get(name, name)} takes {slow.parts[name]:.1f} ms (others: {usual[name]:.1f})" for name in why
        ]
        if more[why[0]] >= slow.waited_for / 2:
            reason = reasons[0]
        elif more[why[0]] + more[why[1]] >= slow.waited_for / 2:
            reason = f"{reasons[0]}, {reasons[1]}"
        else:
            turns = ", ".join(f"rank {row.rank}: {row.waited_for:.1f}" for row in others[:3])
            reason = f"its parts take no longer than those of other ranks, which are late in turns ({turns})"
        summary = f"rank {slow.rank} is the straggler: other ranks wait {slow.waited_for:.1f} of {step:.1f} ms per step"
        rest = "" if why[0] == "exchange" else f"; exchange: {exchange:.1f}"
        return f"{summary}; {reason}{rest}"
    most = max(means, key=lambda name: means[name])
    summary = f"{most} takes longest: {means[most]:.1f} of {step:.1f} ms per step"
    if len(found) == 1:
        return summary
    rest = "" if most == "exchange" else f"; exchange: {exchange:.1f}"
    return f"no straggler (other ranks wait at most {slow.waited_for:.1f} ms per step); {summary}{rest}"


def show(found: Sequence[Row], stream: TextIO) -> None:
    """Print the table and the summary, without colors: a launcher may run each rank in a pseudo-terminal."""
    console = Console(file=stream, highlight=False, color_system=None)
    console.width = max(console.width, NARROWEST)
    steps = found[0].steps if found else 0
    console.print(f"Where the time goes: ms of a step, mean of {steps}")
    table = Table(box=None, header_style="", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("rank")
    table.add_column("host", no_wrap=True, max_width=20)
    for name in ("step", *PARTS, "(hidden)", "waited for"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        numbers = [row.step, *(row.parts[name] for name in PARTS), row.hidden, row.waited_for]
        table.add_row(str(row.rank), row.host, *(f"{number:.1f}" for number in numbers))
    console.print(table)
    console.print(verdict(found), soft_wrap=True)


def write(path: Path, ranks: Sequence[RankParts], problems: Sequence[str]) -> None:
    """Write every rank's mean and every step as JSON; docs/profiling.md documents the keys."""
    found = rows(ranks)
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "verdict": verdict(found),
        "problems": list(problems),
        "ranks": [
            {
                "rank": row.rank,
                "host": row.host,
                "steps": row.steps,
                "step_ms": row.step,
                "parts_ms": row.parts,
                "hidden_ms": row.hidden,
                "waited_for_ms": row.waited_for,
                "clock_error_ms": row.clock_error,
                "each_step": [
                    {"step": s.step, "ms": (s.end - s.start) / 1e6, **{k: v / 1e6 for k, v in s.parts.items()}}
                    for s in one.steps
                ],
            }
            for row, one in zip(found, (one for one in ranks if one.steps), strict=True)
        ],
    }
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
