"""``hvdkit bench``: time a built-in workload in jobs on all ranks and on one, or profile a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from hvdkit.commands.measure.config import Bench
from hvdkit.commands.measure.figures import as_json, as_table
from hvdkit.commands.measure.jobs import launch, measure_ranks
from hvdkit.commands.measure.measurements import RankMeasurement, merge_jobs
from hvdkit.commands.options import check_output, output_errors
from hvdkit.errors import describe
from hvdkit.profiling.settings import TIMELINE, VARIABLE, ProfileSettings

# Number of steps of a built-in workload to profile, after the timed steps.
PROFILED_STEPS = 11


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
        variables |= _profile_variables(ProfileSettings(config.profile.resolve(), first, last, config.timeline))
    return measure_ranks(config, request, variables, np)


def _profile_program(config: Bench, program: Sequence[str]) -> int:
    if config.profile is None:
        remedy = "pass --profile FOLDER, or leave the program out to time a built-in model"
        raise ValueError(describe("--profile", "none", "a folder, for a program", remedy))
    folder = config.profile.resolve()
    code, _ = launch(config, program, _profile_variables(config.profile_settings(folder)))
    file = folder / "profile.json"
    if code == 0 and file.exists() and config.json is not None:
        config.json.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    if code == 0 and not file.exists() and config.hosts is None:
        why = "see the messages above, or the program never called hk.init()"
        print(f"hvdkit bench: no profile was written: {why}", file=sys.stderr)
        return 1
    return code


def _profile_variables(settings: ProfileSettings) -> dict[str, str]:
    """Return the environment variables that enable profiling on every rank."""
    timeline = {TIMELINE: "1"} if settings.timeline else {}
    return {VARIABLE: f"{settings.folder}:{settings.first}-{settings.last}", **timeline}
