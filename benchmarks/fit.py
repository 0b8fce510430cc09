"""Compare hk.fit with Keras's model.fit and a hand-written loop, on the same model, data and optimizer.

python benchmarks/fit.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from figures import Goal, Metric
from harness import Benchmark, Case, Config, Results, Variant, main
from processes import environment, launch, ranks, slowest, worker

Model = Literal["cifar10", "clicks", "classes", "masks"]
TITLES = {
    "cifar10": "the CIFAR-10 tutorial's network",
    "clicks": "a click model with 26 tables",
    "classes": "MobileNetV2 with 1,000 classes",
    "masks": "a U-Net of 256 x 256 pixels and 2 classes",
}
STEPS = {"cifar10": 1, "clicks": 5, "classes": 0.2, "masks": 0.2}  # per step of --steps, by the length of a step
GATHERED: tuple[Model, ...] = ("classes", "masks")  # models whose loss is also computed from the rows of all ranks
METRICS = (Metric(name="ms", title="ms/step", digits=2), Metric(name="cpu_ms", title="CPU ms/step", digits=2))
VARIANTS = {
    "plain": "Keras `model.fit`",
    "loop": "a hand-written loop",
    "hk": "`hk.fit`",
    "fit": "`model.fit` with hvdkit's optimizer and callbacks",
}
MODELS = Path(__file__).resolve().parents[1] / "models"
TURNS = 4  # rounds for each of --rounds, because epochs are short


@dataclass(frozen=True, kw_only=True)
class Fit(Config):
    """Compare hk.fit with model.fit and a loop."""

    model: tuple[Model, ...] = ("cifar10", "clicks", "classes", "masks")
    """Models to train."""
    np: tuple[int, ...] = (1, 2)
    """Numbers of ranks."""
    rounds: int = 3
    """A quarter of the number of rounds, which are short; every variant is timed for one epoch in each."""
    steps: int = 40
    """Steps per epoch of the CIFAR-10 network; more of the click model, fewer of the larger networks."""


def cases(config: Fit) -> list[Case]:
    """Return a case for each model and number of ranks, and one for evaluations."""
    found = [training(model, size, config) for model in config.model if model not in GATHERED for size in config.np]
    if 2 in config.np:
        found += [gathered_loss(model, config) for model in config.model if model in GATHERED]
    return [*found, evaluation(config)] if 2 in config.np and "cifar10" in config.model else found


def gathered_loss(model: Model, config: Fit) -> Case:
    """Return the case of a loss that is computed from the rows of all ranks."""
    about = f"hk.fit with loss_scope='batch' / 'rows', {TITLES[model]}, 2 ranks"
    return Case(
        name=f"gathered-{model}",
        title=f"a loss of the rows of both ranks, {TITLES[model]}",
        variants=[
            Variant(name="rows", title='`hk.fit(loss_scope="rows")`'),
            Variant(name="batch", title='`hk.fit(loss_scope="batch")`'),
        ],
        metrics=METRICS,
        goals=[Goal(upper="batch", lower="rows", limit=1.05, about=about)] if model == "classes" else [],
        reference="rows",
        together=partial(run, model, 2, config, "--scopes"),
    )


def evaluation(config: Fit) -> Case:
    """Return the case of evaluations."""
    about = f"hk.evaluate on 2 ranks / on 1, {TITLES['cifar10']}"
    return Case(
        name="evaluate",
        title=f"evaluation of {TITLES['cifar10']}, time of the call / number of batches",
        variants=[
            Variant(name="one", title="`model.evaluate`, one rank"),
            Variant(name="all", title="`hk.evaluate`, two ranks"),
        ],
        metrics=METRICS,
        goals=[
            Goal(upper="all", lower="one", limit=0.6, headline=True, about=about),
            Goal(upper="all", lower="one", metric="cpu_ms", limit=0.6, about="ratio of CPU times"),
        ],
        reference="one",
        together=partial(run, "cifar10", 2, config, "--evaluate"),
    )


def training(model: Model, size: int, config: Fit) -> Case:
    """Return the case of one model and number of ranks."""
    where = f"{TITLES[model]}, {size} rank{'s' if size > 1 else ''}"
    reference, limit = ("plain", 1.03) if size == 1 else ("loop", 1.05)
    baseline = {"plain": "model.fit", "loop": "a loop"}[reference]
    return Case(
        name=f"{model}-{size}",
        title=where,
        variants=[Variant(name=name, title=title) for name, title in VARIANTS.items() if size == 1 or name != "plain"],
        metrics=METRICS,
        goals=[
            Goal(upper="hk", lower=reference, limit=limit, headline=True, about=f"hk.fit / {baseline}, {where}"),
            Goal(upper="hk", lower=reference, metric="cpu_ms", limit=limit, about="ratio of CPU times"),
            Goal(upper="fit", lower="loop", limit=1.03, about=f"Keras fit / a loop, {where}"),
        ],
        reference=reference,
        together=partial(run, model, size, config),
    )


def run(model: Model, size: int, config: Fit, *args: str | Path) -> Sequence[Mapping[str, Results]]:
    """Run the single job of a case; return the slowest rank's figures by variant, for each round."""
    *words, folder = args
    steps = 10 if config.quick else round(config.steps * STEPS[model])
    rounds = 1 if config.quick else config.rounds * TURNS
    sizes = ["--steps", steps, "--rounds", rounds, "--processes", size]
    program = worker("fit.py", "--model", model, "--folder", folder, *words, *sizes)
    launch([ranks(size, program)], env=environment(PYTHONPATH=str(MODELS)), timeout=900)
    made: list[dict[str, dict[str, float]]] = [{} for _ in range(rounds)]
    for name, value in slowest(Path(folder)).items():
        if " " in name:
            variant, metric, number = name.split()
            made[int(number)].setdefault(variant, {})[metric] = value
    return made


BENCHMARK = Benchmark(
    name="fit",
    title="Keras fit and a loop",
    about="""SGD on arrays in shuffled batches of 64 images or 500 clicks per rank, of 32 for MobileNetV2 and 4 for the
    U-Net, with one compute thread per rank.
    The variants of a table take turns within one job. Each turn trains two epochs and times the second, including its
    end, when the metrics of all ranks are combined. The click model uses hvdkit's tables, and therefore hvdkit's
    optimizer in all variants. CPU time is that of the busiest rank, including the time it waits for others.""",
    cases=cases,
    config=Fit,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
