"""Compare hk.fit with and without XLA, on one rank and on several; on one rank also with Keras's fit.

python benchmarks/compiled.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from figures import Metric
from harness import Benchmark, Case, Config, Results, Variant, main
from processes import environment, launch, ranks, slowest, worker

Model = Literal["lstm", "transformer", "mlp", "convolutions", "clicks"]
TITLES = {
    "lstm": "an LSTM of 128 units",
    "transformer": "a transformer of three blocks",
    "mlp": "four dense layers of 512 units",
    "convolutions": "the CIFAR-10 tutorial's network",
    "clicks": "a click model with 26 tables",
}
STEPS = {"lstm": 1, "transformer": 0.5, "mlp": 2, "convolutions": 1, "clicks": 2}  # per step of --steps
METRICS = (Metric(name="ms", title="ms/step", digits=2), Metric(name="cpu_ms", title="CPU ms/step", digits=2))
VARIANTS = {
    "off": "`hk.fit`",
    "on": "`hk.fit`, `jit_compile=True`",
    "keras": "Keras `model.fit`",
    "xla": "Keras `model.fit`, `jit_compile=True`",
}
MODELS = Path(__file__).resolve().parents[1] / "models"
TURNS = 2  # rounds for each of --rounds


@dataclass(frozen=True, kw_only=True)
class Compiled(Config):
    """Compare hk.fit with and without XLA."""

    model: tuple[Model, ...] = ("lstm", "transformer", "mlp", "convolutions", "clicks")
    """Models to train."""
    np: tuple[int, ...] = (1, 2)
    """Numbers of ranks."""
    rounds: int = 3
    """Half the number of rounds; every variant is timed for one epoch in each."""
    steps: int = 20
    """Steps per epoch of the LSTM; more of smaller models, fewer of the transformer."""


def cases(config: Compiled) -> list[Case]:
    """Return a case for each model and number of ranks."""
    return [training(model, size, config) for model in config.model for size in config.np]


def training(model: Model, size: int, config: Compiled) -> Case:
    """Return the case of one model and number of ranks."""
    with_keras = size == 1 and model != "clicks"
    return Case(
        name=f"{model}-{size}",
        title=f"{TITLES[model]}, {size} rank{'s' if size > 1 else ''}",
        variants=[
            Variant(name=name, title=title) for name, title in VARIANTS.items() if with_keras or name in ("off", "on")
        ],
        metrics=METRICS,
        reference="off",
        together=partial(run, model, size, config),
    )


def run(model: Model, size: int, config: Compiled, folder: Path) -> Sequence[Mapping[str, Results]]:
    """Run the single job of a case; return the slowest rank's figures by variant, for each round."""
    steps = 5 if config.quick else round(config.steps * STEPS[model])
    rounds = 1 if config.quick else config.rounds * TURNS
    sizes = ["--steps", steps, "--rounds", rounds, "--processes", size]
    program = worker("compiled.py", "--model", model, "--folder", folder, *sizes)
    launch([ranks(size, program)], env=environment(PYTHONPATH=str(MODELS)), timeout=900)
    made: list[dict[str, dict[str, float]]] = [{} for _ in range(rounds)]
    for name, value in slowest(Path(folder)).items():
        if " " in name:
            variant, metric, number = name.split()
            made[int(number)].setdefault(variant, {})[metric] = value
    return made


BENCHMARK = Benchmark(
    name="compiled",
    title="Steps compiled by XLA",
    about="""Adam on arrays, with one compute thread per rank. The variants of a table take turns within one job. Each
    turn trains two epochs and times the second, so that the time to compile does not count. The ratio is to `hk.fit`
    without XLA at the same number of ranks: below 1, XLA is faster. Which of the two is faster depends on the model,
    the processor and TensorFlow's version; `HVDKIT_JIT_COMPILE=auto` measures it.""",
    cases=cases,
    config=Compiled,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
