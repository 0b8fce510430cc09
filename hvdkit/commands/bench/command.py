"""The implementation of ``hvdkit bench``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from hvdkit.cluster.log_filter import CHATTER
from hvdkit.commands.bench.config import Bench, RankOptions
from hvdkit.commands.bench.figures import JobResult, Round, as_json, show
from hvdkit.commands.bench.worker import MARK, RankResult, WorkerOptions
from hvdkit.commands.run import restarts
from hvdkit.commands.run.job import Job, prepare
from hvdkit.commands.run.output import OutputWriter
from hvdkit.errors import HvdkitError, describe
from hvdkit.profiling.settings import TIMELINE, VARIABLE, ProfileSettings

# Number of steps of a built-in workload to profile, after the timed steps.
PROFILED = 11


def bench(config: Bench, program: Sequence[str]) -> int:
    """Time a built-in workload, or profile ``program``.

    Returns:
        The exit code: 0, or that of the job that failed; 1 if a program did not write a profile.

    Raises:
        ValueError: an option, a host or the program is invalid; nothing has been started.
        ClusterError: a host is misconfigured, or an engine is missing; nothing has been started.
    """
    _check_writable(config)
    if program:
        return _profile_program(config, program)
    rounds: list[Round] = []
    unprofiled = replace(config, profile=None, timeline=False, profile_steps=None)
    for number in range(config.rounds):
        code, run = _time(unprofiled if number or config.timeline else config, config.np)
        if run is None:
            return code
        alone = None
        if config.scaling and run.ranks > 1:
            code, alone = _time(unprofiled, 1, run.threads)
            if alone is None:
                return code
        rounds.append(Round(run, alone))
    if config.timeline:  # in a separate job, because it slows down rank 0 for the lifetime of the process
        code, run = _time(replace(config, steps=1), config.np)
        if run is None:
            return code
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
        raise ValueError(describe("--profile", got, "a folder that can be written", "name another")) from None
    if config.json is not None:
        place = config.json if config.json.exists() else config.json.parent
        if config.json.is_dir() or not os.access(place, os.W_OK):
            raise ValueError(describe("--json", str(config.json), "a file that can be written", "name another"))


def _time(config: Bench, np: int | None, threads: int | None = None) -> tuple[int, JobResult | None]:
    """Run the workload on ``np`` ranks; return the exit code and the results.

    Args:
        config: the options.
        np: number of ranks; None for the default.
        threads: compute threads per rank; None for hvdkit's default assignment of cores.
    """
    before = config.warm_up + config.steps
    told = WorkerOptions(
        model=config.model,
        batch=config.batch_size,
        optimizer=config.optimizer_name,
        steps=config.steps,
        warm_up=config.warm_up,
        extra=0 if config.profile is None else PROFILED + 1,
    )
    extra = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
    if threads:
        extra |= {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": str(max(2, threads))}
    if config.profile is not None:
        # Leave one step between the timed and the profiled steps for the profiler to start.
        extra |= _asked(ProfileSettings(config.profile.resolve(), before + 2, before + 1 + PROFILED, config.timeline))
    program = [sys.executable, "-m", "hvdkit.commands.bench.worker", json.dumps(asdict(told))]
    code, results = launch(config, np, program, extra)
    if code:
        return code, None
    if results is None:
        raise HvdkitError("hvdkit bench: the ranks ended without a word of what they measured; see their output above")
    return 0, JobResult(len(results), config.batch_size, tuple(RankResult(**one) for one in results))


def _profile_program(config: Bench, program: Sequence[str]) -> int:
    if config.profile is None:
        remedy = "pass --profile FOLDER, or leave the program out to time a built-in model"
        raise ValueError(describe("--profile", "none", "a folder, for a program", remedy))
    folder = config.profile.resolve()
    code, _ = launch(config, config.np, program, _asked(config.profiled(folder)))
    made = folder / "profile.json"
    if code == 0 and made.exists() and config.json is not None:
        config.json.write_text(made.read_text(encoding="utf-8"), encoding="utf-8")
    if code == 0 and not made.exists() and config.hosts is None:
        why = "a line above says why, or the program never called hk.init()"
        print(f"hvdkit bench: no profile was written: {why}", file=sys.stderr)
        return 1
    return code


def _asked(settings: ProfileSettings) -> dict[str, str]:
    """Return the environment variables that enable profiling on every rank."""
    timeline = {TIMELINE: "1"} if settings.timeline else {}
    return {VARIABLE: f"{settings.folder}:{settings.first}-{settings.last}", **timeline}


def launch(
    config: RankOptions, np: int | None, program: Sequence[str], extra: Mapping[str, str]
) -> tuple[int, list[dict[str, Any]] | None]:
    """Run ``program`` on ``np`` ranks; return its exit code, and the results printed by the chief, if any."""
    job = with_variables(prepare(config.launched(np), program), extra)
    output = Listening({1: sys.stdout.buffer, 2: sys.stderr.buffer})
    code = restarts.run(job, program, output)
    return code, output.results


def with_variables(job: Job, extra: Mapping[str, str]) -> Job:
    """Return ``job`` with additional environment variables for all its ranks."""
    names = tuple(sorted({*job.names, *extra}))
    return replace(job, environment={**job.environment, **extra}, names=names)


class Listening(OutputWriter):
    """Writer for the output of all ranks; extracts the chief's line of results."""

    results: list[dict[str, Any]] | None = None

    def write(self, channel: int, data: bytes) -> None:
        """Write lines unchanged, except the results and known noise."""
        lines = data.splitlines(keepends=True)
        for line in lines:
            _, found, figures = line.partition(MARK.encode())
            if found:
                self.results = json.loads(figures)
        shown = [line for line in lines if MARK.encode() not in line and not any(c.encode() in line for c in CHATTER)]
        super().write(channel, b"".join(shown))
