"""Keras's fit beside a hand-written loop, on the same model, batches and optimizer.

python benchmarks/fit.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from figures import Goal, Metric
from harness import Benchmark, Case, Config, Way, main
from processes import WORKERS, environment, launch, ranks, results

Model = Literal["cifar10", "recommender"]
TITLES = {"cifar10": "the CIFAR-10 tutorial's network", "recommender": "a click model with 26 tables"}
METRICS = (Metric(name="ms", title="ms/step", digits=2), Metric(name="memory_mb", title="MB a rank", digits=0))


@dataclass(frozen=True, kw_only=True)
class Fit(Config):
    """Measure fit beside a loop."""

    model: tuple[Model, ...] = ("cifar10", "recommender")
    """Models."""
    np: tuple[int, ...] = (1, 2)
    """Ranks."""
    rounds: int = 3
    """Rounds; every way runs once in each."""
    steps: int = 40
    """Steps in an epoch, of which there are four; the first warms up, the median of the others counts."""


def cases(config: Fit) -> list[Case]:
    """Return a case for each model and number of ranks."""
    found = []
    for model in config.model:
        for size in config.np:
            ranks = f"{size} rank{'s' if size > 1 else ''}"
            about = f"Keras fit / a loop, {TITLES[model]}, {ranks}"
            found.append(
                Case(
                    name=f"{model}-{size}",
                    title=f"{TITLES[model]}, {ranks}",
                    ways=[
                        Way(name="loop", title="a hand-written loop", run=partial(run, "loop", model, size, config)),
                        Way(name="fit", title="Keras `fit`", run=partial(run, "fit", model, size, config)),
                    ],
                    metrics=METRICS,
                    goals=[Goal(upper="fit", lower="loop", limit=1.03, headline=True, about=about)],
                    reference="loop",
                )
            )
    return found


def run(form: str, model: Model, size: int, config: Fit, folder: Path) -> dict[str, float]:
    """Run one form once; return the slowest rank's figures."""
    steps = 10 if config.quick else config.steps * (5 if model == "recommender" else 1)  # whose steps are short
    worker = [sys.executable, str(WORKERS / "fit.py"), form, "--model", model, "--folder", str(folder)]
    worker += ["--steps", str(steps), "--processes", str(size)]
    launch([ranks(size, worker)], env=environment(), timeout=300)
    found = results(folder)
    return {key: max(each[key] for each in found) for key in found[0]}


BENCHMARK = Benchmark(
    name="fit",
    title="Keras fit and a loop",
    about="""Both have what such a script has: hvdkit's optimizer, the chief's first weights, batches from
    `GlobalBatches`, a log line every ten steps and the epoch's mean loss over all ranks; one compute thread a
    rank. The click model's epochs have five times as many steps.""",
    cases=cases,
    config=Fit,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
