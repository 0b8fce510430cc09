"""``hvdkit tune``: find the fastest settings for a model on this cluster, and measure the costs of its step."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hvdkit.commands.bench.command import launch
from hvdkit.commands.bench.config import RankOptions
from hvdkit.commands.bench.tuner import BUCKET, MeasurementRequest
from hvdkit.commands.bench.workloads import BATCHES, MODELS, USUAL_OPTIMIZERS, ModelName, OptimizerName
from hvdkit.commands.plan.measured import Exchange, Gradient, Measurements
from hvdkit.errors import HvdkitError, describe
from hvdkit.optimizer.buckets import buckets

CYCLE = "HOROVOD_CYCLE_TIME"
_BUCKETS = tuple(n * 1024 * 1024 for n in (8, 32, 2, 4, 16, 1024))  # the defaults on one host and between hosts, ...
_CYCLES = ("0.2", "0.1", "1", "2.5")  # the default first
# Horovod searches for its fusion threshold and cycle time; every gradient is submitted separately.
_AUTOTUNE = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_DISABLE_GROUP_FUSION": "0", BUCKET: "1"}
_AUTOTUNE_STEPS = 250  # its warm-up and 20 samples of 10 steps
# A smaller gain may be noise; prefer the default.
_WORTH = 0.98


@dataclass(frozen=True, kw_only=True)
class Tune(RankOptions):
    """Find the best settings for a model on this cluster, and save them with the measurements.

    For example:
        hvdkit tune -np 4 --model resnet50 --save resnet50.json
        HVDKIT_TUNED=resnet50.json horovodrun -np 4 python train.py
        hvdkit plan --measured resnet50.json --ranks 8..4096

    Raises:
        ValueError: an option has an invalid value, or contradicts another.
    """

    save: Path
    """Output file for the measurements (JSON)."""
    model: ModelName = "cifar10"
    """The built-in model most similar to yours; see hvdkit bench --help."""
    batch: int | None = None
    """Examples per step on each rank; the default depends on the model."""
    optimizer: OptimizerName | None = None
    """Optimizer; the default depends on the model."""
    steps: int = 10
    """Steps per measurement."""
    rounds: int = 3
    """Measurements per setting; settings alternate."""
    warm_up: int = 5
    """Warm-up steps."""
    bucket: bool = True
    """Try other bucket sizes for gradients."""
    cycle: bool = True
    """Try other values of HOROVOD_CYCLE_TIME, each in a separate job."""
    autotune: bool = True
    """Try Horovod's own search for settings (250 steps)."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(describe("--model", self.model, " or ".join(MODELS), "pass one of them"))
        self.launched(self.np)
        for name in ("batch", "steps", "rounds", "warm_up"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(describe(f"--{name.replace('_', '-')}", value, "at least 1", "pass another number"))
        try:
            self.save.open("a").close()
        except OSError as error:
            got = f"{self.save} ({error.strerror})"
            raise ValueError(describe("--save", got, "a file that can be written", "name another")) from None

    def wanted(self, **more: Any) -> MeasurementRequest:
        """Return the request for a rank."""
        usual = {"steps": self.steps, "warm_up": self.warm_up, "rounds": self.rounds}
        return MeasurementRequest(
            model=self.model,
            batch=self.batch or BATCHES[self.model],
            optimizer=self.optimizer or USUAL_OPTIMIZERS[self.model],
            **usual | more,
        )


def tune(config: Tune) -> int:
    """Measure, choose and save the settings, and print them for the user.

    Returns:
        The exit code: 0, or that of the job that failed.

    Raises:
        ValueError: an option or a host is invalid; nothing has been started.
        ClusterError: a host is misconfigured, or an engine is missing; nothing has been started.
    """
    try:
        measured, lines = search(config)
    except _JobFailed as failed:
        return failed.code
    measured.save(config.save)
    console = Console(soft_wrap=True, highlight=False)
    for line in lines:
        console.print(line)
    console.print(f"\nbest: {_shown(measured.settings)}\nsaved; to train with it: HVDKIT_TUNED={config.save}")
    return 0


class _JobFailed(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def search(config: Tune) -> tuple[Measurements, list[str]]:
    """Return the measurements and the chosen settings, and lines to print: each setting with its step time."""
    alone = _run(config, config.wanted(compute=True), {}, "one rank alone", np=1)[0]
    limits = _distinct([nbytes for nbytes, _ in alone["gradients"]], several_hosts="," in (config.hosts or ""))
    limits = limits if config.bucket else limits[:1]
    wanted = config.wanted(compute=True, links=True, buckets=limits)
    every = _run(config, wanted, {CYCLE: _CYCLES[0]}, "all ranks")
    timed = {nbytes: _rounds([one["steps"][i] for one in every]) for i, nbytes in enumerate(limits)}
    bucket = _best(timed)
    best, lines = {BUCKET: str(bucket)}, [_line({BUCKET: str(nbytes)}, timed[nbytes]) for nbytes in limits]
    if len(every) > 1:
        found, more = _jobs(config, bucket)
        best, lines = best | found, lines + more
    computing = statistics.median(alone["compute"])
    crowd = 1.0
    if every[0]["rows"][1] == 0:
        crowd = max(1.0, statistics.median(statistics.median(one["compute"]) for one in every) / computing)
    measured = Measurements(
        model=config.model,
        batch=config.batch or BATCHES[config.model],
        ranks=len(every),
        local_ranks=max(one["local_ranks"] for one in every),
        compute_alone=computing,
        compute_together=computing * crowd,
        spread=statistics.median(_spread(one["compute"]) for one in every),
        gradients=tuple(Gradient(*each) for each in alone["gradients"]),
        row_bytes=max(one["rows"][0] for one in every),
        row_exchanges=every[0]["rows"][1],
        copy=alone["copy"],
        exchanges=_exchanges(every),
        settings=best,
    )
    return measured, lines


def _distinct(nbytes: list[int], *, several_hosts: bool) -> tuple[int, ...]:
    """Return the limits that partition gradients of these sizes into different buckets, the default first."""
    cuts: dict[str, int] = {}
    for limit in (_BUCKETS[1], *_BUCKETS) if several_hosts else _BUCKETS:
        cuts.setdefault(str(buckets(nbytes, limit)), limit)
    return tuple(cuts.values())


def _jobs(config: Tune, bucket: int) -> tuple[dict[str, str], list[str]]:
    """Time settings that Horovod reads on startup, in separate jobs; return the best, and the lines to print."""
    candidates = [{CYCLE: cycle} for cycle in (_CYCLES if config.cycle else _CYCLES[:1])]
    if config.autotune:
        candidates.append(_AUTOTUNE)
    timed: dict[int, list[float]] = {number: [] for number in range(len(candidates))}
    for turn in range(config.rounds):
        for number, setting in enumerate(candidates):
            own = setting is _AUTOTUNE
            wanted = config.wanted(
                rounds=1,
                buckets=(int(setting.get(BUCKET, bucket)),),
                warm_up=_AUTOTUNE_STEPS if own else config.warm_up,
            )
            variables = {name: value for name, value in setting.items() if name != BUCKET}
            doing = f"{_shown(setting)}, {turn + 1} of {config.rounds}"
            timed[number] += _rounds([one["steps"][0] for one in _run(config, wanted, variables, doing)])
    lines = [_line(setting, timed[number]) for number, setting in enumerate(candidates)]
    return candidates[_best(timed)], lines


def _run(
    config: Tune, wanted: MeasurementRequest, extra: Mapping[str, str], doing: str, np: int | None = None
) -> list[dict[str, Any]]:
    """Run a job; return the results of each rank. Raises _JobFailed if the job fails."""
    print(f"hvdkit tune: {doing}", file=sys.stderr, flush=True)
    program = [sys.executable, "-m", "hvdkit.commands.bench.tuner", json.dumps(asdict(wanted))]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
    code, found = launch(config, config.np if np is None else np, program, quiet | dict(extra))
    if code:
        raise _JobFailed(code)
    if found is None:
        raise HvdkitError("hvdkit tune: the ranks ended without a word of what they measured; see their output above")
    return found


def _best(timed: Mapping[int, list[float]]) -> int:
    """Return the fastest setting, or the first (default) one if none of the others is faster in every round."""
    (default, usual), *others = timed.items()
    ratios = {setting: [a / b for a, b in zip(rounds, usual, strict=True)] for setting, rounds in others}
    better = {s: statistics.median(r) for s, r in ratios.items() if max(r) < 1 and statistics.median(r) < _WORTH}
    return min(better, key=lambda setting: better[setting], default=default)


def _rounds(by_rank: list[list[list[float]]]) -> list[float]:
    """Return, for each round, the median over steps of the slowest rank's seconds."""
    return [
        statistics.median(max(times) for times in zip(*one_round, strict=True))
        for one_round in zip(*by_rank, strict=True)
    ]


def _line(setting: Mapping[str, str], rounds: list[float]) -> str:
    name = "Horovod's autotune" if setting is _AUTOTUNE else _shown(setting)
    spread = f"{1e3 * min(rounds):.2f} to {1e3 * max(rounds):.2f}"
    return f"{1e3 * statistics.median(rounds):9.2f} ms a step ({spread})  {name}"


def _spread(times: list[float]) -> float:
    """Return a standard deviation that is robust to outliers: half the width of the central two thirds."""
    ordered = sorted(times)
    return (ordered[int(0.84 * (len(ordered) - 1))] - ordered[int(0.16 * (len(ordered) - 1))]) / 2


def _exchanges(every: list[dict[str, Any]]) -> tuple[Exchange, ...]:
    """Return the allreduces, each with the time of the slowest rank."""
    sizes = zip(*(one["exchanges"] for one in every), strict=True)
    return tuple(Exchange(len(every), each[0][0], max(seconds for _, seconds in each)) for each in sizes)


def _shown(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())
