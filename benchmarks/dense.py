"""Compare the dense training step of hvdkit with alternatives, on the CIFAR-10 network, ResNet-50 and a large MLP.

python benchmarks/dense.py                                 # the CIFAR-10 tutorial's network, 2 and 4 processes
python benchmarks/dense.py --model resnet50 mlp --np 1 2   # --json FILE keeps them apart
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import peers
from figures import Goal, Metric
from harness import Benchmark, Case, Config, Variant, main
from processes import environment, free_ports, horovodrun, launch, ranks, results, worker

Model = Literal["cifar10", "resnet50", "mlp"]
BATCH: Mapping[str, int] = {"cifar10": 64, "resnet50": 16, "mlp": 64}
TITLES = {
    "cifar10": "the CIFAR-10 tutorial's network, 4.3 MB of gradients, 64 images per process",
    "resnet50": "ResNet-50 on 32x32 images, 94 MB of gradients, 16 images per process",
    "mlp": "an MLP with 100 MB of gradients, 64 examples per process",
}
VARIANTS = {
    "alone": "{n} independent processes",
    "tied": "{n} ranks that average one number per step",
    "hvdkit": "hvdkit, `hvdkit run -np {n}`",
    "horovodrun": "hvdkit, `horovodrun -np {n}`",
    "sharded": "hvdkit, `shard_states=True`",
    "fp16": 'hvdkit, `compression="fp16"`',
    "horovod": "raw Horovod, `horovodrun -np {n}`",
    "multiworker": "MultiWorkerMirroredStrategy",
    "ddp": "PyTorch DDP, Gloo",
    "towers": "towers: one process, averaging on its CPU",
    "ps": "ParameterServerStrategy: 1 server, {n} workers",
}
SINGLE = {"alone": "plain TensorFlow", "hvdkit": "hvdkit, one rank", "horovod": "raw Horovod, one rank"}
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
METRICS = (
    Metric(name="ms", title="ms/step"),
    Metric(name="images", title="images/s, total", digits=0),
    Metric(name="memory_mb", title="MB per process", digits=0),
)


@dataclass(frozen=True, kw_only=True)
class Dense(Config):
    """Measure the dense training step."""

    model: tuple[Model, ...] = ("cifar10", "resnet50", "mlp")
    """Networks to train."""
    np: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes. With one, raw Horovod is the only peer; four only run the CIFAR-10 network."""
    rounds: int = 5
    """Number of rounds; every variant runs once per round. Half as many, except for CIFAR-10 on two processes."""
    steps: int = 30
    """Timed steps per run; the figure is their median, averaged over processes."""
    peer_python: Path | None = None
    """Python of an environment with PyTorch to use instead of building one."""


def cases(config: Dense) -> list[Case]:
    """Return a case for each network and number of processes."""
    pairs = itertools.product(config.model, config.np)
    return [case(model, size, config) for model, size in pairs if size <= 2 or model == "cifar10"]


def case(model: Model, size: int, config: Dense) -> Case:
    """Return all variants of one network on one number of processes."""
    steps = 3 if config.quick else config.steps if model == "cifar10" else max(1, config.steps // 2)
    run = partial(run_variant, model=model, size=size, steps=steps, peer=config.peer_python)
    return Case(
        name=f"{model}-{size}",
        title=f"{TITLES[model]}, {size} process{'es' if size > 1 else ''}",
        variants=[
            Variant(name=name, title=title.format(n=size) if size > 1 else SINGLE[name], run=partial(run, name))
            for name, title in VARIANTS.items()
            if size > 1 or name in SINGLE
        ],
        metrics=METRICS,
        goals=goals(model, size),
        reference="hvdkit",
        # Most goals are for the tutorial's network on two processes; full rounds of the others would take an hour.
        rounds=config.rounds if (model, size) == ("cifar10", 2) else (config.rounds + 1) // 2,
    )


def goals(model: Model, size: int) -> list[Goal]:
    """Return the goals."""
    if (model, size) == ("cifar10", 2):
        step = "A dense step on 2 ranks / "
        return [
            Goal(upper="hvdkit", lower="alone", limit=1.03, headline=True, about=f"{step}2 independent processes"),
            goal("multiworker", 1.2, "MultiWorkerMirroredStrategy / hvdkit, 2 ranks"),
            goal("ddp", 1.5, "PyTorch DDP / hvdkit, 2 ranks"),
            goal("horovod", 1.5, "Raw Horovod / hvdkit, 2 ranks"),
            goal("ps", 3, "ParameterServerStrategy / hvdkit, 2 ranks"),
        ]
    if (model, size) == ("cifar10", 4):
        about = "A dense step on 4 ranks / 4 independent processes"
        return [Goal(upper="hvdkit", lower="alone", limit=1.1, headline=True, about=about)]
    return []


def goal(variant: str, limit: float, about: str) -> Goal:
    """Return the goal that ``variant`` takes at least ``limit`` times as long as hvdkit."""
    return Goal(upper=variant, lower="hvdkit", relation=">=", limit=limit, headline=True, about=about)


def run_variant(
    variant: str, folder: Path, *, model: Model, size: int, steps: int, peer: Path | None
) -> dict[str, float]:
    """Run one variant once."""
    common = ["--folder", folder, "--model", model, "--batch", BATCH[model], "--steps", steps]
    if variant == "ddp":
        commands = [peers.torch_processes(peer, size, worker("dense_torch.py", *common, "--processes", size))]
    elif variant == "ps":
        commands = ps_processes(common, size)
    else:
        commands = tensorflow_processes(variant, common, size)
    # The baseline for hvdkit's overhead uses huge pages, as hvdkit's ranks do.
    launch(commands, env=environment(**(HUGE_PAGES if variant == "alone" else {})), timeout=300)
    found = results(folder)
    milliseconds = statistics.mean(each["ms"] for each in found if "ms" in each)
    return {
        "ms": milliseconds,
        "images": 1000 * size * BATCH[model] / milliseconds,
        # Parameter servers count as memory of the ranks that need them.
        "memory_mb": sum(each["memory_mb"] for each in found) / size,
    }


def tensorflow_processes(variant: str, common: Sequence[object], size: int) -> list[list[str]]:
    """Return the commands of ranks under a launcher, or of separate processes."""
    if variant == "towers":
        return [worker("dense_tf.py", variant, *common, "--towers", size)]
    program = worker("dense_tf.py", "hvdkit" if variant == "horovodrun" else variant, *common, "--processes", size)
    if variant in ("hvdkit", "sharded", "fp16", "tied"):
        return [ranks(size, program)]
    if variant in ("horovodrun", "horovod"):
        return [horovodrun(size, program)]
    ports = ["--ports", *map(str, free_ports(size))] if variant == "multiworker" else []
    return [[*program, "--number", str(number), *ports] for number in range(size)]


def ps_processes(common: Sequence[object], size: int) -> list[list[str]]:
    """Return the commands of coordinator, server and workers."""
    program = worker("dense_ps.py", *common, "--ports", *free_ports(size + 2), "--role")
    return [[*program, "chief"], [*program, "ps"], *([*program, "worker", "--number", str(i)] for i in range(size))]


BENCHMARK = Benchmark(
    name="dense",
    title="The dense training step",
    about="""Forward and backward pass, averaging and SGD update on constant float32 inputs, on one machine, with one
    compute thread and the same batch size in each process. `hvdkit run` requests huge pages, and so do the independent
    processes. These do not communicate at all, so no other variant can be faster. Ranks that average one number, but no
    gradients, show the cost of waiting for each other.
    The workers of a parameter server do not wait for each other; a step is the time in which all of them together
    compute as many batches as there are workers (the time of K scheduled steps x workers / K). The memory per process
    includes the parameter server; for towers, it is the memory of their one process divided by their number.""",
    cases=cases,
    config=Dense,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
