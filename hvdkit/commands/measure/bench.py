"""``hvdkit bench``: time a built-in workload in jobs on all ranks and on one, or profile a program."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

from hvdkit._version import __version__
from hvdkit.commands.measure.config import Bench
from hvdkit.commands.measure.jobs import launch, measure_ranks
from hvdkit.commands.measure.measurements import RankMeasurement, merge_jobs, round_seconds, slowest_steps
from hvdkit.commands.options import check_output, output_errors
from hvdkit.errors import describe
from hvdkit.machine.terminal import aligned
from hvdkit.profiling.settings import ProfileSettings

# Number of steps of a built-in workload to profile, after the timed steps.
PROFILED_STEPS = 11
FORMAT_VERSION = 1
# If the ratio of the quartiles is larger, other load on the machine affects the result.
MAX_QUARTILE_RATIO = 1.25
_NAMES = ("ranks", "ms/step", "quartiles", "examples/s", "efficiency", "collectives", "MB sent", "MB per rank")


def bench(config: Bench, program: Sequence[str]) -> int:
    """Time a built-in workload, or profile ``program``. Return the exit code.

    Raises:
        ValueError: an option, a host or the program is invalid; nothing has been started.
        ClusterError: a host is misconfigured, or an engine is missing; nothing has been started.
        SystemExit: a job with the built-in workload has failed.
    """
    _prepare_outputs(config)
    if program:
        return _profile_program(config, program)
    jobs = _time_rounds(config)
    print(as_table(config, jobs))
    if config.json is not None:
        config.json.write_text(json.dumps(as_json(config, jobs), indent=1), encoding="utf-8")
    return 0


def _prepare_outputs(config: Bench) -> None:
    """Fail early if outputs cannot be written, not after hours of measuring; remove an earlier profile."""
    if config.profile is not None:
        with output_errors("--profile", config.profile, "folder"):
            config.profile.mkdir(parents=True, exist_ok=True)
            for name in ("trace.json.gz", "profile.json"):
                (config.profile / name).unlink(missing_ok=True)
    if config.json is not None:
        check_output("--json", config.json)


def _time_rounds(config: Bench) -> list[list[RankMeasurement]]:
    """Return the measurements of the job on all ranks and, if requested, of that on one rank; each of all rounds."""
    unprofiled = replace(config, profile=None, timeline=False, profile_steps=None)
    together = []
    alone = []
    for number in range(config.rounds):
        ranks = _time(unprofiled if number or config.timeline else config)
        together.append(ranks)
        if config.scaling and len(ranks) > 1:
            alone.append(_time(unprofiled, 1, ranks[0].threads))
    if config.timeline:  # in a separate job, because it slows down rank 0 for the lifetime of the process
        _time(replace(config, steps=1))
    return [merge_jobs(jobs) for jobs in (together, alone) if jobs]


def _time(config: Bench, np: int | None = None, threads: int = 0) -> list[RankMeasurement]:
    """Run the workload; ``threads`` per rank, if not 0, replace hvdkit's assignment of cores."""
    # Each round has one more warm-up step.
    request = replace(config.request, rounds=1, warm_up=config.warm_up - 1, buckets=(None,))
    variables: dict[str, str] = {}
    if threads:
        variables |= {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": str(max(2, threads))}
    if config.profile is not None:
        # Leave one step between the timed and the profiled steps for the profiler to start.
        request = replace(request, profiled=PROFILED_STEPS + 1)
        first = config.warm_up + config.steps + 2
        last = first + PROFILED_STEPS - 1
        variables |= ProfileSettings(config.profile.resolve(), first, last, config.timeline).variables()
    return measure_ranks(config, request, variables, np)


def _profile_program(config: Bench, program: Sequence[str]) -> int:
    if config.profile is None:
        remedy = "pass --profile FOLDER, or leave the program out to time a built-in model"
        raise ValueError(describe("--profile", "none", "a folder, for a program", remedy))
    folder = config.profile.resolve()
    code, _ = launch(config, program, config.profile_settings(folder).variables())
    file = folder / "profile.json"
    if code == 0 and file.exists() and config.json is not None:
        config.json.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    if code == 0 and not file.exists() and config.hosts is None:
        why = "see the messages above, or the program never called hk.init()"
        print(f"hvdkit bench: no profile was written: {why}", file=sys.stderr)
        return 1
    return code


# ---- the results ------------------------------------------------------------------------------------------------


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
