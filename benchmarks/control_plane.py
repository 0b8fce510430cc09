"""Measure what the control plane costs rank 0 and hvdkit run, with up to thousands of simulated ranks.

    python benchmarks/control_plane.py --ranks 4 256 1024 4096
    python benchmarks/control_plane.py --ranks 4 64 --quick

Rank 0's sentinel and hvdkit run execute hvdkit's own code, each alone in a process, so that the CPU time of the process
is their cost. Two processes simulate the other ranks without TensorFlow: they connect over loopback with the sentinels'
connection code, and write their parts of checkpoints with hvdkit's own code.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import tyro
from figures import Goal, Measured, Metric, Round, Sheet
from harness import Output, publish
from processes import RunFailed, environment, launch, worker

SCRIPT = "control_plane.py"
ABOUT = """The cost to rank 0 and to hvdkit run of all communication between ranks other than training. Both execute
hvdkit's own code, alone in a process, so that the CPU time of the process is the cost. Two processes on the same
machine simulate the other ranks, without TensorFlow, but with real connections over loopback and real files. Every
eight ranks form a host. The restore is that of one rank. The exchange of objects is a ring, in which rank 0 sees each
rank's message once."""
SIMULATORS = 2
FAILURE_SECONDS, KNOWN_RANKS = 5.0, 1024
SHARE, WATCHED_RANKS = 5.0, 4096
# The smallest number of ranks for comparing growth: below it, fixed costs of a phase hide the cost per rank.
GROWS_FROM = 256
# Counts are exact, but CPU times of a few milliseconds vary on a machine with other load.
COUNT_TOLERANCE, CPU_TOLERANCE, LEAST_CPU = 1.1, 1.6, 0.05
COLUMNS = {
    "cpu": "CPU, s",
    "share": "% of a core",
    "seconds": "seconds",
    "known": "known everywhere, s",
    "messages": "messages",
    "bytes": "bytes",
    "wakeups": "wake-ups/s",
    "memory": "extra MB",
}


@dataclass(frozen=True, kw_only=True)
class Config(Output):
    """Measure the control plane."""

    ranks: tuple[int, ...] = (4, 256, 1024, 4096)
    """Numbers of simulated ranks."""
    seconds: float = 20.0
    """Seconds for which the watchdog is measured."""
    quick: bool = False
    """Measure for three seconds; results are only recorded with --json."""


Figures = dict[str, dict[str, float]]  # by phase, then by quantity


def main() -> int:
    """Run all phases at each number of ranks; return MISSED if a goal is missed."""
    config = tyro.cli(Config, description=__doc__)
    load = machine.load_average()
    found: dict[int, Figures] = {}
    for size in sorted(config.ranks):
        began = time.monotonic()
        found[size] = simulate(size, 3.0 if config.quick else config.seconds)
        took = time.monotonic() - began
        print(f"{size} ranks: {took:.0f} s, {json.dumps(found[size]['watchdog'])}", file=sys.stderr, flush=True)
    case = goals(found, load)
    measured = [case] if case.metrics else []  # otherwise no size has a goal
    title = "The control plane at thousands of ranks"
    return publish("control_plane", title, ABOUT, config, measured=measured, sheets=tables(found))


def simulate(size: int, seconds: float) -> Figures:
    """Run all phases of a job of ``size`` ranks."""
    found: Figures = {}
    for fault in ("kill", "error"):
        rank0, ranks = run("watchdog", size, "--seconds", seconds, "--fault", fault)
        ends = [end for part in ranks for end in part["ends"]]
        if None in ends:
            raise RunFailed(f"{ends.count(None)} of {size} ranks were not notified of the failure")
        known = max(ends) - max(part["struck"] or 0.0 for part in ranks)
        found[f"failure ({fault})"] = {"known": known, "cpu": rank0["cpu"], "messages": 2.0 * size}
        found |= {"start": rank0["start"], "watchdog": rank0["steady"]}
    found |= run("exchange", size, simulators=1)[0]
    with tempfile.TemporaryDirectory() as folder:
        found |= run("checkpoint", size, folder=Path(folder))[0]
        found |= run("manifest", size, simulators=1, folder=Path(folder))[0]
    for fault in ("none", "error"):
        found |= run("launcher", size, "--fault", fault, simulators=0)[0]
    return found


def run(
    phase: str, size: int, *flags: object, simulators: int = SIMULATORS, folder: Path | None = None
) -> tuple[Any, list[Any]]:
    """Run a phase's processes; return rank 0's figures, and those of the simulated ranks."""
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            return run(phase, size, *flags, simulators=simulators, folder=Path(made))
    for name in ("place.json", "rank0.json", *(path.name for path in folder.glob("ranks-*.json"))):
        (folder / name).unlink(missing_ok=True)
    step = max(1, math.ceil((size - 1) / max(1, simulators)))
    firsts = range(1, size, step) if simulators else range(0)
    (folder / "parts.json").write_text(json.dumps([f"ranks-{first}.json" for first in firsts]))
    common = (phase, size, folder)
    others = [worker(SCRIPT, "ranks", *common, "--first", n, "--stop", min(n + step, size)) for n in firsts]
    launch([worker(SCRIPT, "rank0", *common, *flags), *others], env=environment(), timeout=1800)
    ranks = [json.loads((folder / f"ranks-{first}.json").read_text()) for first in firsts]
    return json.loads((folder / "rank0.json").read_text()), ranks


def tables(found: Mapping[int, Figures]) -> list[Sheet]:
    """Return a table for each phase, with a row for each number of ranks."""
    rows = []
    for phase in next(iter(found.values())):
        for size, figures in found.items():
            values = figures[phase]
            rows.append([phase, size, *(shown(name, values.get(name)) for name in COLUMNS)])
    sheets = [Sheet(title="rank 0 and hvdkit run", header=["phase", "ranks", *COLUMNS.values()], rows=rows)]
    growth = [[phase, name, shown_growth(value), f"{limit:.1f}"] for phase, name, value, limit in growths(found)]
    if growth:
        last = max(found)
        title = f"growth from {GROWS_FROM} to {last} ranks; N log N grows by {n_log_n(GROWS_FROM, last):.1f}"
        sheets.append(Sheet(title=title, header=["phase", "quantity", "grows by", "limit"], rows=growth))
    return sheets


def shown(name: str, value: float | None) -> str:
    """Format a figure."""
    if value is None:
        return ""
    return f"{value:,.0f}" if name in ("messages", "bytes") else f"{value:.3f}" if name == "cpu" else f"{value:.2f}"


def shown_growth(value: float | None) -> str:
    """Format a ratio."""
    return "too short to compare" if value is None else f"{value:.1f}"


def n_log_n(few: int, many: int) -> float:
    """Return the growth factor of N log N between two numbers of ranks."""
    return many * math.log(many) / (few * math.log(few))


def growths(found: Mapping[int, Figures]) -> Iterator[tuple[str, str, float | None, float]]:
    """Yield phase, quantity, growth factor, and limit; the factor is None if the CPU time is too short to compare."""
    few, many = GROWS_FROM, max(found)
    if few not in found or few >= many:
        return
    for phase, before in found[few].items():
        after = found[many][phase]
        for name, tolerance in (("messages", COUNT_TOLERANCE), ("bytes", COUNT_TOLERANCE), ("cpu", CPU_TOLERANCE)):
            if not before.get(name) or name not in after:
                continue
            # A CPU time of a few milliseconds is dominated by the machine's other load.
            small = name == "cpu" and after[name] < LEAST_CPU
            yield phase, name, None if small else after[name] / before[name], tolerance * n_log_n(few, many)


def goals(found: Mapping[int, Figures], load: float) -> Measured:
    """Return the quantities that have goals, as one round of a single variant."""
    results: dict[str, float] = {}
    wanted: list[Goal] = []

    def goal(name: str, value: float, limit: float, about: str) -> None:
        results[name] = value
        wanted.append(Goal(upper="hvdkit", metric=name, limit=limit, about=about, headline=True))

    for size, figures in found.items():
        if size == WATCHED_RANKS:
            about = f"CPU time of rank 0's sentinel with {size} ranks, % of a core"
            goal("share", figures["watchdog"]["share"], SHARE, about)
        if size == KNOWN_RANKS:
            known = max(values["known"] for values in figures.values() if "known" in values)
            goal("known", known, FAILURE_SECONDS, f"Seconds until all {size} ranks know of a failure")
        sent = figures["manifest exchange"]["bytes"] / size
        manifest = figures["manifest"]["bytes"]
        if size >= GROWS_FROM:
            about = f"Bytes of the manifest sent to each of {size} ranks in a restore / its size"
            goal(f"manifest-{size}", sent / manifest, 0.05, about)
    compared = [(phase, name, value / limit) for phase, name, value, limit in growths(found) if value is not None]
    if compared:
        phase, name, worst = max(compared, key=lambda each: each[2])
        goal("growth", worst, 1.0, f"Fastest growth ({name}, {phase}) / growth of N log N, with a margin for noise")
    metrics = [Metric(name=name, title=name, digits=None) for name in results]
    variants = {"hvdkit": "simulated ranks"}
    rounds = [Round(results={"hvdkit": results}, order=["hvdkit"], load=load)]
    return Measured(name="goals", title="goals", metrics=metrics, variants=variants, goals=wanted, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
