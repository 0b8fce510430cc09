"""``hvdkit tune``: find the fastest settings for a model on this cluster, and measure the costs of its step."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdkit.commands.measure.config import Tune
from hvdkit.commands.measure.jobs import measure_ranks
from hvdkit.commands.measure.measurements import (
    BUCKET,
    CYCLE,
    Measurements,
    MeasureRequest,
    RankMeasurement,
    round_seconds,
)
from hvdkit.optimizer.buckets import buckets

# The first two are the defaults: on one host, and on several.
_BUCKETS = tuple(n * 1024 * 1024 for n in (8, 32, 2, 4, 16, 1024))
_CYCLES = ("0.2", "0.1", "1", "2.5")  # the default first
# Horovod searches for its fusion threshold and cycle time; every gradient is submitted separately.
_AUTOTUNE = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_DISABLE_GROUP_FUSION": "0", BUCKET: "1"}
_AUTOTUNE_STEPS = 250  # its warm-up and 20 samples of 10 steps
# A setting must be faster than this factor of the default: a smaller gain may be noise.
_MAX_RATIO = 0.98


def tune(config: Tune) -> str:
    """Measure, choose and save the settings; return them as text for the user.

    Raises:
        ValueError: an option or a host is invalid; nothing has been started.
        ClusterError: a host is misconfigured, or an engine is missing; nothing has been started.
        SystemExit: a job has failed.
    """
    measurements, lines = search(config)
    measurements.save(config.save)
    end = ["", f"best: {_text(measurements.settings)}", f"saved; to train with it: HVDKIT_TUNED={config.save}"]
    return "\n".join([*lines, *end])


def search(config: Tune) -> tuple[Measurements, list[str]]:
    """Return the measurements and the chosen settings, and lines to print: each setting with its step time."""
    alone = _run(config, replace(config.request, compute=True), {}, "one rank alone", np=1)[0]
    limits = _distinct_limits([each.nbytes for each in alone.gradients], several_hosts="," in (config.hosts or ""))
    limits = limits if config.bucket else limits[:1]
    request = replace(config.request, compute=True, links=True, buckets=limits)
    ranks = _run(config, request, {CYCLE: _CYCLES[0]}, "all ranks")
    timed = {nbytes: round_seconds(ranks, number) for number, nbytes in enumerate(limits)}
    bucket = _fastest(timed)
    best = {BUCKET: str(bucket)}
    lines = [_line({BUCKET: str(nbytes)}, timed[nbytes]) for nbytes in limits]
    if len(ranks) > 1:
        best_startup, startup_lines = _search_startup_settings(config, bucket)
        best = best | best_startup
        lines = lines + startup_lines
    compute_alone = statistics.median(alone.compute)
    slowdown = 1.0
    if ranks[0].row_exchanges == 0:
        slowdown = max(1.0, statistics.median(statistics.median(rank.compute) for rank in ranks) / compute_alone)
    measurements = Measurements(
        model=config.model,
        batch=config.batch_size,
        ranks=len(ranks),
        local_ranks=max(rank.local_ranks for rank in ranks),
        compute_alone=compute_alone,
        compute_together=compute_alone * slowdown,
        spread=statistics.median(_spread(rank.compute) for rank in ranks),
        gradients=tuple(alone.gradients),
        row_bytes=max(rank.row_bytes for rank in ranks),
        row_exchanges=ranks[0].row_exchanges,
        copy=alone.copy,
        exchanges=tuple(
            max(same_size, key=lambda each: each.seconds)
            for same_size in zip(*(rank.exchanges for rank in ranks), strict=True)
        ),
        settings=best,
    )
    return measurements, lines


def _distinct_limits(nbytes: list[int], *, several_hosts: bool) -> tuple[int, ...]:
    """Return the limits that partition gradients of these sizes into different buckets, the default first."""
    partitions: dict[str, int] = {}
    for limit in (_BUCKETS[1], *_BUCKETS) if several_hosts else _BUCKETS:
        partitions.setdefault(str(buckets(nbytes, limit)), limit)
    return tuple(partitions.values())


def _search_startup_settings(config: Tune, bucket: int) -> tuple[dict[str, str], list[str]]:
    """Time settings that Horovod reads on startup, in separate jobs; return the best, and the lines to print."""
    candidates = [{CYCLE: cycle} for cycle in (_CYCLES if config.cycle else _CYCLES[:1])]
    if config.autotune:
        candidates.append(_AUTOTUNE)
    timed: dict[int, list[float]] = {number: [] for number in range(len(candidates))}
    for turn in range(config.rounds):
        for number, setting in enumerate(candidates):
            request = replace(
                config.request,
                rounds=1,
                buckets=(int(setting.get(BUCKET, bucket)),),
                warm_up=_AUTOTUNE_STEPS if setting is _AUTOTUNE else config.warm_up,
            )
            variables = {name: value for name, value in setting.items() if name != BUCKET}
            ranks = _run(config, request, variables, f"{_text(setting)}, {turn + 1} of {config.rounds}")
            timed[number] += round_seconds(ranks)
    lines = [_line(setting, timed[number]) for number, setting in enumerate(candidates)]
    return candidates[_fastest(timed)], lines


def _run(
    config: Tune, request: MeasureRequest, variables: Mapping[str, str], title: str, np: int | None = None
) -> list[RankMeasurement]:
    """Run a job, and return the measurements of each rank."""
    print(f"hvdkit tune: {title}", file=sys.stderr, flush=True)
    return measure_ranks(config, request, variables, np)


def _fastest(timed: Mapping[int, list[float]]) -> int:
    """Return the fastest setting, or the first (default) one if none of the others is faster in every round."""
    (default, default_seconds), *others = timed.items()
    ratios = {setting: [a / b for a, b in zip(rounds, default_seconds, strict=True)] for setting, rounds in others}
    better = {s: statistics.median(r) for s, r in ratios.items() if max(r) < 1 and statistics.median(r) < _MAX_RATIO}
    return min(better, key=lambda setting: better[setting], default=default)


def _line(setting: Mapping[str, str], rounds: list[float]) -> str:
    name = "Horovod's autotune" if setting is _AUTOTUNE else _text(setting)
    spread = f"{1e3 * min(rounds):.2f} to {1e3 * max(rounds):.2f}"
    return f"{1e3 * statistics.median(rounds):9.2f} ms a step ({spread})  {name}"


def _spread(times: Sequence[float]) -> float:
    """Return a standard deviation that is robust to outliers: half the width of the central two thirds."""
    ordered = sorted(times)
    return (ordered[int(0.84 * (len(ordered) - 1))] - ordered[int(0.16 * (len(ordered) - 1))]) / 2


def _text(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())
