"""Compare saving and restoring 2 GB of state with plain files of the same size, on the same disk in the same run.

python benchmarks/checkpoint.py
python benchmarks/checkpoint.py --np 2 --rounds 8 --folder /shared
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from figures import Goal, Metric
from harness import Benchmark, Case, Config, Variant, main
from processes import environment, launch, ranks, worker

METRICS = (
    Metric(name="write", title="seconds to write", digits=2),
    Metric(name="read", title="seconds to read", digits=2),
    Metric(name="call", title="asynchronous save: the call, s", digits=3),
    Metric(name="next", title="extra time of the next step, s", digits=3),
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Config):
    """Measure saving and restoring."""

    np: tuple[int, ...] = (1, 2)
    """Numbers of ranks."""
    gigabytes: float = 2.0
    """Size of the state, over all ranks."""
    rounds: int = 5
    """Number of rounds, after one warm-up round."""
    folder: Path = Path()
    """Folder on the disk to measure."""


def cases(config: Checkpoint) -> list[Case]:
    """Return a case for each number of ranks; one job measures both variants, because both need the state."""
    plain, ours = ("plain", "plain files, fsync"), ("hvdkit", "hvdkit, with checksums, verified on reading")
    return [
        Case(
            name=f"np-{size}",
            title=f"{config.gigabytes:g} GB over {size} rank{'s' if size > 1 else ''}",
            variants=[Variant(name=name, title=title) for name, title in (plain, ours)],
            metrics=METRICS,
            goals=goals(size),
            reference="plain",
            together=partial(run, size, config),
        )
        for size in config.np
    ]


def goals(size: int) -> list[Goal]:
    """Return the goals."""
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    return [
        Goal(upper="plain", lower="hvdkit", metric="write", relation=">=", limit=0.8, headline=True,
             about=f"Saving / plain files, speed, {ranks}"),
        Goal(upper="plain", lower="hvdkit", metric="read", relation=">=", limit=0.8, headline=True,
             about=f"Restoring / plain files, speed, {ranks}"),
        Goal(upper="hvdkit", lower="hvdkit", metric="stall", lower_metric="write", limit=0.1, headline=True,
             about=f"Stall of an asynchronous save / a blocking one, {ranks}"),
        Goal(upper="hvdkit", metric="save_mb", limit=64, about="extra memory of a blocking save, MB"),
        Goal(upper="hvdkit", metric="async_share", limit=1, about="extra memory of an asynchronous save / the shard"),
        Goal(upper="hvdkit", metric="read_share", limit=1.05, about="bytes read for a shard / its size"),
    ]  # fmt: skip


def run(size: int, config: Checkpoint, _: Path) -> list[Mapping[str, Mapping[str, float]]]:
    """Run the worker on ``size`` ranks; return its rounds."""
    rounds, gigabytes = (1, 0.1) if config.quick else (config.rounds, config.gigabytes)
    with tempfile.TemporaryDirectory(dir=config.folder, prefix=".checkpoint-benchmark-") as folder:
        program = worker("checkpoint.py", folder, "--gigabytes", gigabytes, "--rounds", rounds)
        launch([ranks(size, program)], env=environment(threads=None), timeout=1800)
        return json.loads((Path(folder) / "results.json").read_text())


BENCHMARK = Benchmark(
    name="checkpoint",
    title="Saving and restoring",
    about="""Each rank writes and reads its shard of one table as a plain file, sequentially and with fsync; hvdkit
    saves and restores the same bytes. The order of the two writes alternates between rounds, because a disk that has
    just written several GB is slower for the next ones. Before each read, the files are dropped from the page cache.
    Seconds are the slowest rank's.""",
    cases=cases,
    config=Checkpoint,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
