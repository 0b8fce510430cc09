"""Compare hk.fit with and without XLA, on one rank and on several, and with Keras's fit in separate processes.

python benchmarks/compiled.py
python benchmarks/compiled.py --auto  # what HVDKIT_JIT_COMPILE=auto chooses, for notes/compiled.md
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import tyro
from figures import Metric
from harness import Benchmark, Case, Config, Results, Variant, main
from processes import environment, launch, ranks, slowest, worker

Model = Literal["lstm", "transformer", "mlp", "convolutions", "resnet50", "clicks"]
TITLES = {
    "lstm": "an LSTM of 128 units",
    "transformer": "a transformer of three blocks",
    "mlp": "four dense layers of 512 units",
    "convolutions": "the CIFAR-10 tutorial's network",
    "resnet50": "ResNet-50 on images of 32 x 32",
    "clicks": "a click model with 26 tables",
}
STEPS = {"lstm": 1, "transformer": 0.5, "mlp": 2, "convolutions": 1, "resnet50": 0.25, "clicks": 2}  # per --steps
METRICS = (
    Metric(name="ms", title="ms/step", digits=2),
    Metric(name="cpu_ms", title="CPU ms/step", digits=2),
    Metric(name="memory_mb", title="peak MB of a rank", digits=0),
)
VARIANTS = {
    "off": "`hk.fit`",
    "on": "`hk.fit`, `jit_compile=True`",
}
ALONE = {  # as many processes as ranks, each with a rank's batch, which exchange nothing
    "keras": "Keras `model.fit`, processes that exchange nothing",
    "xla": "the same, `jit_compile=True`",
}
CHOICES = Path(__file__).resolve().parent / "notes" / "compiled.md"
MODELS = Path(__file__).resolve().parents[1] / "models"
TURNS = 2  # rounds for each of --rounds


@dataclass(frozen=True, kw_only=True)
class Compiled(Config):
    """Compare hk.fit with and without XLA."""

    model: tuple[Model, ...] = ("lstm", "transformer", "mlp", "convolutions", "resnet50", "clicks")
    """Models to train."""
    np: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks."""
    rounds: int = 3
    """Half the number of rounds; every variant is timed for one epoch in each."""
    steps: int = 20
    """Steps per epoch of the LSTM; more of smaller models, fewer of larger ones."""
    auto: bool = False
    """Record what HVDKIT_JIT_COMPILE=auto chooses for each model, and measure nothing else."""


def cases(config: Compiled) -> list[Case]:
    """Return a case for each model and number of ranks."""
    return [training(model, size, config) for model in config.model for size in config.np]


def training(model: Model, size: int, config: Compiled) -> Case:
    """Return the case of one model and number of ranks."""
    titles = VARIANTS if model == "clicks" else VARIANTS | ALONE
    return Case(
        name=f"{model}-{size}",
        title=f"{TITLES[model]}, {size} rank{'s' if size > 1 else ''}",
        variants=[Variant(name=name, title=title) for name, title in titles.items()],
        metrics=METRICS,
        reference="off",
        together=partial(run, model, size, config),
    )


def run(model: Model, size: int, config: Compiled, folder: Path) -> Sequence[Mapping[str, Results]]:
    """Run the jobs of a case; return the slowest rank's figures by variant, for each round.

    One job times both forms of hk.fit in turns; another job of separate processes times Keras's fit. The peak memory of
    each form is that of one more job, which runs nothing else.
    """
    steps = 5 if config.quick else max(4, round(config.steps * STEPS[model]))
    rounds = 1 if config.quick else config.rounds * TURNS
    made: list[dict[str, dict[str, float]]] = [{} for _ in range(rounds)]

    def job(name: str, count: int, *, alone: bool, only: str = "") -> dict[str, float]:
        results = Path(folder) / name
        results.mkdir()
        words = ["--model", model, "--folder", results, "--steps", steps, "--rounds", count, "--processes", size]
        words += ["--only", only] if only else []
        one = [worker("compiled.py", *words, "--alone", "--number", number) for number in range(size)]
        commands = one if alone else [ranks(size, worker("compiled.py", *words))]
        launch(commands, env=environment(PYTHONPATH=str(MODELS)), timeout=900)
        return slowest(results)

    figures = job("ranks", rounds, alone=False)
    if model != "clicks":
        figures |= job("alone", rounds, alone=True)
    for name, value in figures.items():
        if " " in name:
            variant, metric, number = name.split()
            made[int(number)].setdefault(variant, {})[metric] = value
    for variant in made[0]:
        memory = job(f"memory-{variant}", 1, alone=variant in ALONE, only=variant)["memory_mb"]
        for each in made:
            each[variant]["memory_mb"] = memory
    return made


def record_choices(config: Compiled) -> None:
    """Write notes/compiled.md: what HVDKIT_JIT_COMPILE=auto chooses for each model, as logged."""
    lines = ["What `HVDKIT_JIT_COMPILE=auto` chose:", "", "| model | ranks | log line |", "|---|---|---|"]
    for model in config.model:
        for size in config.np:
            with tempfile.TemporaryDirectory() as folder:
                words = ["--model", model, "--folder", folder, "--steps", 40, "--processes", size, "--auto"]
                variables = {"PYTHONPATH": str(MODELS), "HVDKIT_JIT_COMPILE": "auto"}
                output = launch([ranks(size, worker("compiled.py", *words))], env=environment(**variables), timeout=900)
            line = next((each for each in output.splitlines() if "ms with XLA" in each), "nothing was measured")
            text = line.partition("jit_compile: ")[2] or line
            print(f"{model}, {size}: {text}")
            lines.append(f"| {TITLES[model]} | {size} | {text} |")
    CHOICES.write_text("\n".join(lines) + "\n")


BENCHMARK = Benchmark(
    name="compiled",
    title="Steps compiled by XLA",
    about="""Adam on arrays, with one compute thread per rank. Both forms of `hk.fit` take turns within one job, and
    both forms of Keras's `fit` in another: as many processes as ranks, each with a rank's batch, which exchange
    nothing. Each turn trains two epochs and times the second, so that the time to compile does not count. The peak
    memory of each form is that of a separate job, and includes compilation. The ratio is to `hk.fit` without XLA at
    the same number of ranks: below 1, XLA is faster. Which of the two is faster depends on the model, the processor
    and TensorFlow's version; `HVDKIT_JIT_COMPILE=auto` measures it.""",
    cases=cases,
    config=Compiled,
)

if __name__ == "__main__":
    if "--auto" in sys.argv:
        record_choices(tyro.cli(Compiled))
    else:
        sys.exit(main(BENCHMARK))
