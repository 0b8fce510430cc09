"""The implementation of ``hvdkit bench``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from hvdkit.cluster.log_filter import CHATTER
from hvdkit.commands.bench.config import Bench, JobOptions
from hvdkit.commands.bench.figures import JobResult, Round, as_json, show
from hvdkit.commands.bench.worker import MARK, RankResult, WorkerOptions
from hvdkit.commands.run import restarts
from hvdkit.commands.run.job import Job, prepare
from hvdkit.commands.run.output import OutputWriter
from hvdkit.errors import HvdkitError, describe
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
    _check_writable(config)
    if program:
        return _profile_program(config, program)
    rounds = _time_rounds(config)
    show(config, rounds, sys.stdout)
    if config.json is not None:
        config.json.write_text(json.dumps(as_json(config, rounds), indent=1), encoding="utf-8")
    return 0


def _check_writable(config: Bench) -> None:
    """Fail early if outputs cannot be written, not after hours of measuring; remove an earlier profile."""
    try:
        if config.profile is not None:
            config.profile.mkdir(parents=True, exist_ok=True)
            for name in ("trace.json.gz", "profile.json"):
                (config.profile / name).unlink(missing_ok=True)
    except OSError as error:
        got = f"{config.profile} ({error.strerror})"
        raise ValueError(describe("--profile", got, "a folder that can be written", "pass another")) from None
    if config.json is not None:
        target = config.json if config.json.exists() else config.json.parent
        if config.json.is_dir() or not os.access(target, os.W_OK):
            raise ValueError(describe("--json", str(config.json), "a file that can be written", "pass another"))


def _time_rounds(config: Bench) -> list[Round]:
    unprofiled = replace(config, profile=None, timeline=False, profile_steps=None)
    rounds = []
    for number in range(config.rounds):
        job = _time(unprofiled if number or config.timeline else config, config.np)
        alone = _time(unprofiled, 1, job.threads) if config.scaling and job.ranks > 1 else None
        rounds.append(Round(job, alone))
    if config.timeline:  # in a separate job, because it slows down rank 0 for the lifetime of the process
        _time(replace(config, steps=1), config.np)
    return rounds


def _time(config: Bench, np: int | None, threads: int | None = None) -> JobResult:
    """Run the workload on ``np`` ranks, or the default; ``threads`` per rank replace hvdkit's assignment of cores."""
    options = WorkerOptions(
        model=config.model,
        batch=config.batch_size,
        optimizer=config.optimizer_name,
        steps=config.steps,
        warm_up=config.warm_up,
        extra=0 if config.profile is None else PROFILED_STEPS + 1,
    )
    variables: dict[str, str] = {}
    if threads:
        variables |= {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": str(max(2, threads))}
    if config.profile is not None:
        # Leave one step between the timed and the profiled steps for the profiler to start.
        first = config.warm_up + config.steps + 2
        last = first + PROFILED_STEPS - 1
        variables |= _profile_variables(ProfileSettings(config.profile.resolve(), first, last, config.timeline))
    results = run_workers(config, np, "hvdkit.commands.bench.worker", options, variables)
    return JobResult(len(results), config.batch_size, tuple(RankResult(**result) for result in results))


def _profile_program(config: Bench, program: Sequence[str]) -> int:
    if config.profile is None:
        remedy = "pass --profile FOLDER, or leave the program out to time a built-in model"
        raise ValueError(describe("--profile", "none", "a folder, for a program", remedy))
    folder = config.profile.resolve()
    code, _ = launch(config, config.np, program, _profile_variables(config.profile_settings(folder)))
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


def run_workers(
    config: JobOptions, np: int | None, module: str, options: Any, variables: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Run ``module`` on ``np`` ranks, and return the results of each rank.

    Args:
        config: the ranks to start.
        np: number of ranks; None for the default.
        module: the module to run; it calls :func:`worker.send_result`.
        options: a dataclass, passed to the module as JSON.
        variables: environment variables for all ranks.

    Raises:
        SystemExit: the job has failed with this exit code; its output has the reason.
        HvdkitError: the job has succeeded, but printed no results.
    """
    program = [sys.executable, "-m", module, json.dumps(asdict(options))]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
    code, results = launch(config, np, program, {**quiet, **variables})
    if code:
        raise SystemExit(code)
    if results is None:
        raise HvdkitError("the ranks ended without printing their measurements; see their output above")
    return results


def launch(
    config: JobOptions, np: int | None, program: Sequence[str], variables: Mapping[str, str]
) -> tuple[int, list[dict[str, Any]] | None]:
    """Run ``program`` on ``np`` ranks; return its exit code, and the results printed by the chief, if any."""
    job = with_variables(prepare(config.run_config(np), program), variables)
    output = ResultsFilter({1: sys.stdout.buffer, 2: sys.stderr.buffer})
    code = restarts.run(job, program, output)
    return code, output.results


def with_variables(job: Job, variables: Mapping[str, str]) -> Job:
    """Return ``job`` with additional environment variables for all its ranks."""
    names = tuple(sorted({*job.names, *variables}))
    return replace(job, environment={**job.environment, **variables}, names=names)


class ResultsFilter(OutputWriter):
    """Writes the output of all ranks, except the chief's line of results, which it reads."""

    results: list[dict[str, Any]] | None = None

    def write(self, channel: int, data: bytes) -> None:
        """Write lines unchanged, except the results and known noise."""
        lines = data.splitlines(keepends=True)
        for line in lines:
            _, mark, results = line.partition(MARK.encode())
            if mark:
                self.results = json.loads(results)
        shown = [line for line in lines if MARK.encode() not in line and not any(c.encode() in line for c in CHATTER)]
        super().write(channel, b"".join(shown))
