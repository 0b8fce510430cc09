"""The report of a profile: a table with a row per rank, a summary sentence, and the output files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import see
from hvdkit.machine.terminal import aligned
from hvdkit.profiling import trace
from hvdkit.profiling.intervals import clip, total, union
from hvdkit.profiling.rank_profile import RankProfile
from hvdkit.profiling.step_parts import PARTS, RankParts, divide

FORMAT_VERSION = 1
# Waiting below this fraction of a step is not reported.
MIN_WAIT = 0.05
_LABELS = {"other": "Python (other)"}


def write_report(folder: Path, profiles: Sequence[RankProfile], log: Callable[[str], None]) -> None:
    """Write ``trace.json.gz`` and ``profile.json`` into ``folder``, and print the table and the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = divide(profiles)
    rows = mean_rows(ranks)
    for profile in profiles:
        profile.drop_short_ops(trace.MOST_OPS, trace.SHORTEST_NS)
    path = folder / "trace.json.gz"
    trace.write(path, profiles, ranks)
    problems = [f"rank {profile.rank}: {problem}" for profile in profiles for problem in profile.problems]
    (folder / "profile.json").write_text(json.dumps(as_json(rows, ranks, problems), indent=1), encoding="utf-8")
    if not rows:
        log(f"profile: no step was recorded; the run was too short, or nothing counts its steps: {see('profiling')}")
        return
    print_table(rows)
    if incomplete := ", ".join(str(profile.rank) for profile in profiles if profile.problems):
        log(f"profile: incomplete recording on rank {incomplete}: do not rely on its row or on the summary")
    error = max(profile.clock_error for profile in profiles) / 1e6
    clocks_are = "one clock" if error == 0 else f"clocks aligned to {error:.3f} ms"
    log(f"profile: {path} ({path.stat().st_size / 1e6:.1f} MB, {clocks_are}); open it with https://ui.perfetto.dev")


@dataclass(frozen=True)
class Row:
    """One rank's mean step, in milliseconds; the names of the attributes are keys of ``profile.json``."""

    rank: int
    host: str
    steps: int  # number of steps recorded
    step_ms: float
    parts_ms: dict[str, float]  # the time of each of PARTS; they add up to step_ms
    hidden_ms: float  # exchange that overlaps with compute; included in compute
    waited_for_ms: float  # the longest time that another rank spent only waiting for this one
    clock_error_ms: float  # maximum error of its times relative to rank 0's clock


def mean_rows(ranks: Sequence[RankParts]) -> list[Row]:
    """Return each rank's mean over its steps; ranks without recorded steps are omitted."""
    return [_row(rank, ranks) for rank in ranks if rank.steps]


def _row(rank: RankParts, ranks: Sequence[RankParts]) -> Row:
    count = sum(step.steps for step in rank.steps)
    per_step = 1e6 * count  # from the total in nanoseconds to the mean in milliseconds
    start = rank.steps[0].start
    end = rank.steps[-1].end
    waits = [total(clip(union(other.waits_for.get(rank.rank, [])), start, end)) for other in ranks]
    return Row(
        rank=rank.rank,
        host=rank.host,
        steps=count,
        step_ms=(end - start) / per_step,
        parts_ms={name: sum(step.parts[name] for step in rank.steps) / per_step for name in PARTS},
        hidden_ms=sum(step.hidden for step in rank.steps) / per_step,
        waited_for_ms=max(waits, default=0) / per_step,
        clock_error_ms=rank.clock_error / 1e6,
    )


def summarize(rows: Sequence[Row]) -> str:
    """Return a one-line summary: the straggler and the reason, and other expensive parts.

    Example:
        >>> parts = {"compute": 50.0, "exchange": 4.0, "wait": 0.0, "input": 1.0, "save": 0.0, "other": 1.0}
        >>> slow = Row(1, "b", 10, 66.0, {**parts, "input": 11.0}, 1.0, 10.0, 0.0)
        >>> waiting = Row(0, "a", 10, 66.0, {**parts, "wait": 10.0}, 1.0, 0.0, 0.0)
        >>> print(summarize([waiting, slow]).replace("; ", "\\n"))
        rank 1 is the straggler: other ranks wait 10.0 of 66.0 ms per step
        its input takes 11.0 ms (others: 1.0)
        exchange: 4.0
    """
    if not rows:
        return "no step was recorded"
    step = sum(row.step_ms for row in rows) / len(rows)
    means = _mean_parts(rows)
    exchange = f"; exchange: {means['exchange']:.1f}"
    # A rank that is late because it waited for a rank in another group of the mesh is not the straggler.
    slow = max(rows, key=lambda row: row.waited_for_ms - row.parts_ms["wait"])
    others = sorted((row for row in rows if row is not slow), key=lambda row: -row.waited_for_ms)
    if others and slow.waited_for_ms >= MIN_WAIT * step:
        wait = f"other ranks wait {slow.waited_for_ms:.1f} of {step:.1f} ms per step"
        cause, reason = _explain(slow, others)
        return f"rank {slow.rank} is the straggler: {wait}; {reason}{'' if cause == 'exchange' else exchange}"
    most = max(means, key=lambda name: means[name])
    summary = f"{most} takes longest: {means[most]:.1f} of {step:.1f} ms per step"
    if not others:
        return summary
    no_straggler = f"no straggler (other ranks wait at most {slow.waited_for_ms:.1f} ms per step)"
    return f"{no_straggler}; {summary}{'' if most == 'exchange' else exchange}"


def _explain(slow: Row, others: Sequence[Row]) -> tuple[str, str]:
    """Return the part that delays the rank ``slow`` most, and why other ranks wait for it."""
    usual = _mean_parts(others)
    delays = {name: slow.parts_ms[name] - usual[name] for name in PARTS if name != "wait"}
    first, second, *_ = sorted(delays, key=lambda name: -delays[name])
    reasons = [
        f"its {_LABELS.get(name, name)} takes {slow.parts_ms[name]:.1f} ms (others: {usual[name]:.1f})"
        for name in (first, second)
    ]
    if delays[first] >= slow.waited_for_ms / 2:
        return first, reasons[0]
    if delays[first] + delays[second] >= slow.waited_for_ms / 2:
        return first, ", ".join(reasons)
    turns = ", ".join(f"rank {row.rank}: {row.waited_for_ms:.1f}" for row in others[:3])
    return first, f"its parts take no longer than those of other ranks, which take turns being late ({turns})"


def _mean_parts(rows: Sequence[Row]) -> dict[str, float]:
    return {name: sum(row.parts_ms[name] for row in rows) / len(rows) for name in PARTS}


def print_table(rows: Sequence[Row]) -> None:
    """Print the table and the summary, without colors: a launcher may run each rank in a pseudo-terminal."""
    table: list[Sequence[str]] = [("rank", "host", "step", *PARTS, "(hidden)", "waited for")]
    for row in rows:
        numbers = [row.step_ms, *(row.parts_ms[name] for name in PARTS), row.hidden_ms, row.waited_for_ms]
        host = row.host if len(row.host) <= 20 else f"{row.host[:19]}…"
        table.append((str(row.rank), host, *(f"{number:.1f}" for number in numbers)))
    lines = aligned(table, right=range(2, len(table[0])))
    print(f"Where the time goes: ms of a step, mean of {rows[0].steps}", *lines, summarize(rows), sep="\n", flush=True)


def as_json(rows: Sequence[Row], ranks: Sequence[RankParts], problems: Sequence[str]) -> dict[str, object]:
    """Return every rank's mean and every step for JSON; docs/profiling.md documents the keys."""
    return {
        "format_version": FORMAT_VERSION,
        "verdict": summarize(rows),
        "problems": list(problems),
        "ranks": [
            {
                **vars(row),
                "each_step": [
                    {"step": s.step, "ms": (s.end - s.start) / 1e6, **{k: v / 1e6 for k, v in s.parts.items()}}
                    for s in rank.steps
                ],
            }
            for row, rank in zip(rows, (rank for rank in ranks if rank.steps), strict=True)
        ],
    }
