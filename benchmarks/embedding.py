"""Compare a step of sharded embeddings with replicated tables and TorchRec: lookup, loss, update.

python benchmarks/embedding.py                                        # one table, and 26 tables with ragged ids
python benchmarks/embedding.py --work one-adagrad many-adam --ahead
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import peers
from figures import Goal, Metric
from harness import Benchmark, Case, Config, Variant, main
from processes import environment, horovodrun, launch, ranks, slowest, worker

Work = Literal["one-sgd", "one-adagrad", "one-adam", "many-sgd", "many-adagrad", "many-adam"]
TITLES = {"one": "one table of 1,000,000 x 64", "many": "26 tables of mixed sizes and widths, ragged ids"}
OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "lazy Adam"}
# name: (title, arguments of the worker, processes)
VARIANTS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "plain": ("plain: one process, `tf.gather`, `scatter_sub`", ("plain",), 1),
    "hvdkit-1": ("hvdkit, one rank", ("hvdkit",), 1),
    "hvdkit-2": ("hvdkit, two ranks", ("hvdkit",), 2),
    "apart-2": ("hvdkit, two jobs of one rank at once", ("hvdkit",), 2),
    "ahead-2": ("hvdkit, two ranks, ids sent one step ahead", ("hvdkit", "--ahead"), 2),
    "sparse-2": ("raw Horovod, two ranks, sparse gradients gathered", ("sparse",), 2),
    "dense-2": ("raw Horovod, two ranks, gradients converted to dense", ("dense",), 2),
    "torchrec-1": ("TorchRec, one rank", ("--sharding", "table_wise"), 1),
    "torchrec-2": ("TorchRec, two ranks, table-wise", ("--sharding", "table_wise"), 2),
    "torchrec-columns-2": ("TorchRec, two ranks, column-wise", ("--sharding", "column_wise"), 2),
}
METRICS = (
    Metric(name="ms", title="ms/step"),
    Metric(name="memory_mb", title="MB per rank", digits=0),
    Metric(name="table_mb", title="of which tables", digits=0),
)


@dataclass(frozen=True, kw_only=True)
class Embedding(Config):
    """Measure a step of sharded embeddings."""

    work: tuple[Work, ...] = ("one-sgd", "many-sgd")
    """Tables and optimizer to measure."""
    rounds: int = 3
    """Number of rounds; every variant runs once per round."""
    steps: int = 40
    """Timed steps per run; the figure is the slowest rank's median."""
    ahead: bool = False
    """Also measure with ids sent one step ahead (layer.ask)."""
    peer_python: Path | None = None
    """Python of an environment with TorchRec to use instead of building one."""


def cases(config: Embedding) -> list[Case]:
    """Return a case for each workload."""
    return [case(work, config) for work in config.work]


def case(work: Work, config: Embedding) -> Case:
    """Return the variants of one workload."""
    tables, _, optimizer = work.partition("-")
    # TorchRec pools each feature from one table; with dense gradients, 26 tables or slots take too long.
    left_out = set() if work == "one-sgd" else {"dense-2", "torchrec-1", "torchrec-2", "torchrec-columns-2"}
    if not config.ahead:
        left_out.add("ahead-2")
    steps = 3 if config.quick else config.steps
    return Case(
        name=work,
        title=f"{TITLES[tables]}, {OPTIMIZERS[optimizer]}",
        variants=[
            Variant(
                name=name, title=title, run=partial(run_variant, name, work=work, steps=steps, peer=config.peer_python)
            )
            for name, (title, _, _) in VARIANTS.items()
            if name not in left_out
        ],
        metrics=METRICS,
        goals=goals(work),
        reference="hvdkit-2",
    )


def goals(work: Work) -> list[Goal]:
    """Return the goals; those of one table with SGD are headline goals."""
    first = work == "one-sgd"
    found = [
        Goal(upper="hvdkit-2", lower="sparse-2", limit=0.45, headline=first,
             about="A step of a sharded table on 2 ranks / raw Horovod's"),
        Goal(upper="hvdkit-2", lower="hvdkit-1", limit=1.08, headline=first,
             about="A step of a sharded table on 2 ranks / on 1"),
        Goal(upper="hvdkit-1", lower="plain", limit=1.0, headline=first,
             about="A step of a sharded table on 1 rank / plain TensorFlow"),
        Goal(upper="hvdkit-2", lower="hvdkit-1", metric="table_mb", limit=0.51, headline=first,
             about="Memory of a table on each of 2 ranks / on 1"),
        Goal(upper="hvdkit-2", metric="bytes_ratio", limit=1.05,
             about="bytes sent / (distinct ids per pair of ranks x (id + 2 rows))"),
        Goal(upper="hvdkit-2", metric="alltoalls", limit=3, about="alltoalls per step"),
    ]  # fmt: skip
    if first:
        about = "TorchRec on CPUs / hvdkit, 2 ranks"
        found.append(Goal(upper="torchrec-2", lower="hvdkit-2", relation=">=", limit=5, headline=True, about=about))
    return found


def run_variant(variant: str, folder: Path, *, work: Work, steps: int, peer: Path | None) -> dict[str, float]:
    """Run one variant once; return the maximum of every figure over the ranks."""
    _, words, size = VARIANTS[variant]
    common = ["--folder", folder, "--steps", steps, "--processes", size, *words]
    tables, _, optimizer = work.partition("-")
    program = worker("embedding_tf.py", "--work", tables, "--optimizer", optimizer, *common)
    if variant.startswith("torchrec"):
        commands = [peers.torch_processes(peer, size, worker("embedding_torch.py", *common))]
    elif variant == "apart-2":
        commands = [ranks(1, [*program, "--number", str(number)]) for number in range(size)]
    elif words[0] == "hvdkit":
        commands = [ranks(size, program)]
    else:
        commands = [horovodrun(size, program) if size > 1 else program]
    launch(commands, env=environment(), timeout=300)
    return slowest(folder)


BENCHMARK = Benchmark(
    name="embedding",
    title="A step of sharded embeddings",
    about="""4,096 samples per rank with 26 features, whose ids follow Zipf's law (1.2) with different frequent ids for
    each feature. A step looks up the rows, computes their mean square as the loss, and updates them, with one compute
    thread per process. Each rank holds all rows of replicated tables. `hvdkit run` starts hvdkit's ranks and requests
    huge pages. The two jobs of one rank that run at once do not communicate, and each holds a whole table: they show
    how much processes on this machine slow each other down.""",
    cases=cases,
    config=Embedding,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
