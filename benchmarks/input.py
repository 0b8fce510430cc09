"""Measure the file sources: bytes read per rank, examples per second, an epoch of 10**10 examples. Compare with others.

python benchmarks/input.py
python benchmarks/input.py --formats tfrecord --rounds 3 --json tfrecord.json
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal, get_args

import peers
from figures import Goal, Metric
from harness import Benchmark, Case, Config, Variant, main
from processes import environment, launch, slowest, worker

Format = Literal["parquet", "tfrecord", "array_record", "delimited", "criteo", "npy"]
NAMES: Mapping[str, str] = {
    "parquet": "Parquet",
    "tfrecord": "TFRecord",
    "array_record": "ArrayRecord",
    "delimited": "delimited text",
    "criteo": "Criteo's logs",
    "npy": ".npy",
}
PEERS = {
    "tf": "tf.data",
    "pyarrow": "pyarrow's scanner, to NumPy",
    "grain": "Grain, `__getitems__` of whole batches",
    "torch": "PyTorch DataLoader, lists of rows of memory maps",
}
# For each format and order: the other readers. "+" marks one that can only read in order.
READERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "parquet": {"in order": ("pyarrow",), "blocks": ("+pyarrow",), "full": ()},
    "tfrecord": {"in order": ("tf",), "blocks": ("tf",), "full": ("tf",)},
    "array_record": {"in order": ("grain",), "blocks": ("grain",), "full": ("grain",)},
    "delimited": {"in order": ("tf", "pyarrow"), "blocks": ("tf", "+pyarrow"), "full": ("tf",)},
    "criteo": {"in order": ("tf",), "blocks": ("tf",)},
    "npy": {"in order": ("torch",), "blocks": ("+torch",), "full": ("torch",)},
}
ORDERS = {
    "in order": "in order",
    "lanes": "lanes in order",
    "blocks": "blocks shuffled",
    "full": "full shuffle",
}
SPEED = (
    Metric(name="us", title="CPU µs/example", digits=None),
    Metric(name="per_second", title="examples/s per core", digits=0),
    Metric(name="memory_mb", title="peak MB", digits=0),
)
BYTES = tuple(Metric(name=f"ranks_{n}", title=f"{n} rank{'s' if n > 1 else ''}", digits=2) for n in (1, 2, 4))


@dataclass(frozen=True, kw_only=True)
class Input(Config):
    """Measure the file sources."""

    formats: tuple[Format, ...] = get_args(Format)
    """Formats to measure."""
    rounds: int = 3
    """Number of rounds; every variant runs once per round. Bytes do not differ between rounds: one."""
    rows: int = 2**19
    """Number of examples in the files of each format."""
    seconds: float = 1.0
    """Whole epochs are read until they have taken at least so many seconds of CPU time."""
    peer_python: Path | None = None
    """Python of an environment with PyTorch to use instead of building one."""


def cases(config: Input) -> list[Case]:
    """Return a case for the bytes, one for each format and order, and those of large and resumed epochs."""
    rows = 2**16 if config.quick else config.rows
    speeds = [speed(name, order, rows, config) for name in config.formats for order in READERS[name]]
    return [bytes_per_rank(rows, config), *speeds, resuming(rows, config), ten_billion()]


@cache
def data(rows: int) -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """Return a folder with the files, which are written once, and removed at the end of this process."""
    folder = tempfile.TemporaryDirectory(prefix="hvdkit-input-")
    launch([worker("input_data.py", folder.name, "--rows", rows, "--row-group", rows // 16)], env=environment())
    return Path(folder.name), folder


def speed(name: Format, order: str, rows: int, config: Input) -> Case:
    """Return the readers of one format in one order."""
    run = partial(read, name, order, rows, config)
    variants = [Variant(name="hvdkit", title="hvdkit", run=partial(run, "hvdkit"))]
    goals = []
    for peer in READERS[name][order]:
        bare = peer.removeprefix("+")
        variants.append(Variant(name=bare, title=PEERS[bare] + ", in order" * (bare != peer), run=partial(run, peer)))
        about = f"CPU time per example of {NAMES[name]}, {ORDERS[order]}: hvdkit / {PEERS[bare].partition(',')[0]}"
        if bare == peer:
            goals.append(Goal(upper="hvdkit", lower=bare, metric="us", limit=1.1, headline=True, about=about))
    note = ", in batches of 65,536" if (name, order) == ("parquet", "full") else ""
    return Case(
        name=f"{name}-{order.replace(' ', '-')}",
        title=f"{NAMES[name]}, {ORDERS[order]}{note}",
        variants=variants,
        metrics=SPEED,
        goals=goals,
        reference="hvdkit",
    )


def read(name: Format, order: str, rows: int, config: Input, reader: str, folder: Path) -> dict[str, float]:
    """Run one reader once."""
    if reader.startswith("+"):
        order, reader = "in order", reader[1:]
    common = ["--folder", folder, "--data", data(rows)[0], "--rows", rows]
    seconds = 0.1 if config.quick else config.seconds
    program = worker("input_read.py", reader, name, order, *common, "--seconds", seconds)
    if reader == "torch":
        program = [str(peers.python("torch", config.peer_python)), *program[1:]]
    elif reader == "grain":
        packages = next(peers.python("grain").parents[1].glob("lib/python*/site-packages"))
        program += ["--packages", str(packages)]
    launch([program], env=environment(), timeout=300)
    return slowest(folder)


def check(words: list[str], rows: int, folder: Path) -> dict[str, float]:
    """Run one check of hvdkit's sources."""
    launch([worker("input_checks.py", *words, "--folder", folder, "--data", data(rows)[0])], env=environment())
    return slowest(folder)


def bytes_per_rank(rows: int, config: Input) -> Case:
    """Return what the rank that reads most reads."""
    variants, goals = [], []
    for name in config.formats:
        for order in ("in order", "lanes", "blocks", *(("full",) if name == "parquet" else ())):
            variant, title = f"{name}-{order.replace(' ', '-')}", f"{NAMES[name]}, {ORDERS[order]}"
            run = partial(check, ["bytes", name, "--order", order], rows)
            variants.append(Variant(name=variant, title=title, run=run))
            # Rows of a row group cannot be read alone: without lanes, ranks that share one all read it.
            if order != "full" and (name, order) != ("parquet", "in order"):
                about = f"Bytes that a rank of 4 reads / a quarter of the files: {title}"
                goals.append(Goal(upper=variant, metric="ranks_4", limit=1.1, headline=order == "blocks", about=about))
    title = "bytes that a rank reads in an epoch, as a multiple of 1/N of the files"
    return Case(name="bytes", title=title, variants=variants, metrics=BYTES, goals=goals, rounds=1)


def resuming(rows: int, config: Input) -> Case:
    """Return the time to the first batch after 0 and 90 % of an epoch."""
    metrics = (
        Metric(name="late", title="seconds, after 90 %", digits=3),
        Metric(name="start", title="seconds, at the start", digits=3),
    )
    variants, goals = [], []
    for name in config.formats:
        for order in ("blocks", "full"):
            variant, title = f"{name}-{order}", f"{NAMES[name]}, {ORDERS[order]}"
            run = partial(check, ["resume", name, "--order", order], rows)
            variants.append(Variant(name=variant, title=title, run=run))
            about = f"{title}: seconds to resume after 90 % of an epoch - at its start"
            same = {"upper": variant, "lower": variant, "metric": "late", "lower_metric": "start"}
            goals.append(Goal(**same, difference=True, limit=1, about=about))
    title = "time to the first batch"
    return Case(name="resume", title=title, variants=variants, metrics=metrics, goals=goals, rounds=1)


def ten_billion() -> Case:
    """Return the cost of the order of 10 billion examples."""
    metrics = (
        Metric(name="ns", title="CPU ns/position"),
        Metric(name="per_second", title="positions/s per core", digits=0),
        Metric(name="mb", title="MB of memory", digits=0),
        Metric(name="first", title="seconds to the first batch", digits=3),
    )
    variants, goals = [], []
    for order in ("full", "blocks"):
        run = partial(huge, order)
        variants.append(Variant(name=order, title=ORDERS[order], run=run))
        about = f"10 billion examples, {ORDERS[order]}"
        goals += [
            Goal(upper=order, metric="mb", limit=50, headline=True, about=f"{about}: MB of memory"),
            Goal(upper=order, metric="first", limit=1, headline=True, about=f"{about}: seconds to the first batch"),
            Goal(upper=order, metric="ns", limit=100, headline=True, about=f"{about}: CPU ns per position"),
        ]
    title = "the order of 10 billion examples, in batches of 65,536"
    return Case(name="huge", title=title, variants=variants, metrics=metrics, goals=goals)


def huge(order: str, folder: Path) -> dict[str, float]:
    """Compute the order once."""
    words = ["huge", order, "--folder", folder, "--data", folder]
    launch([worker("input_checks.py", *words)], env=environment())
    return slowest(folder)


BENCHMARK = Benchmark(
    name="input",
    title="Reading files",
    about="""Half a million examples of four int64 and nine float32 (for Criteo's logs: a label, 13 counts and 26
    categories) in four files, which are in the page cache; batches of 4,096 examples as arrays. Every process is pinned
    to one core and reads whole epochs; the figure is its CPU time, over all threads, per example, so that other work on
    the machine counts little. All readers must get the same sum of the first batch. Shuffle buffers hold 65,536
    examples; tf.data's for a full shuffle hold all. "in order" for a peer in a table of shuffled blocks means that it
    does not shuffle. Bytes are those that the process asks the kernel for; ranks of 1, 2 and 4 read one after the
    other, and the one that reads most counts. Shuffled blocks and lanes have `interleave=4`.""",
    cases=cases,
    config=Input,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
