"""Read the files of benchmarks/input.py with one library, on one core, and write the CPU time per example."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from input_peers import READERS
from input_schema import BATCH, LARGE_BATCH, WINDOW
from timing import leave


def main() -> None:
    """Read epochs for at least ``--seconds`` of CPU time."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("reader")
    options.add_argument("format")
    options.add_argument("order", choices=("in order", "blocks", "full"))
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--rows", type=int, required=True)
    options.add_argument("--seconds", type=float, required=True)
    options.add_argument("--packages", help="a folder to import from what this environment does not have")
    args = options.parse_args()
    if args.packages:
        sys.path.append(args.packages)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before libraries count cores
    files = sorted(map(str, (args.data / args.format).glob("part-*")))
    if args.reader == "hvdkit":
        epochs = hvdkit_epochs(args.format, files)
    else:
        epochs = partial(READERS[args.reader], args.format, files=files, rows=args.rows)
    first = next(iter(epochs("in order")))  # also traces functions
    if total(first) != expected(args.format, args.data):
        sys.exit(f"error: the sum of the first batch is {total(first)}, expected {expected(args.format, args.data)}")
    examples, started = 0, time.process_time()
    while time.process_time() - started < args.seconds:
        examples += sum(map(rows_of, epochs(args.order)))
    seconds = time.process_time() - started
    leave(args.folder, 0, {"us": 1e6 * seconds / examples, "per_second": examples / seconds})


def hvdkit_epochs(name: str, files: list[str]) -> Callable[[str], Iterator[Any]]:
    """Return what yields the batches of the next epoch in an order."""
    from input_checks import source_of

    import hvdkit as hk

    source = source_of(name, files)
    made: dict[str, hk.data.GlobalBatches] = {}

    def epoch(order: str) -> Iterator[Any]:
        if order not in made:
            seed, mode = None if order == "in order" else 0, "blocks" if order == "blocks" else "full"
            rows = LARGE_BATCH if (name, order) == ("parquet", "full") else BATCH
            window = WINDOW if mode == "blocks" else None
            made[order] = hk.data.GlobalBatches(
                source, rows, shuffle_seed=seed, shuffle=mode, shuffle_buffer=window, rank=0, size=1
            )
        return made[order].one_epoch()

    return epoch


def leaves(batch: Any) -> Iterable[Any]:
    """Return the arrays of a batch."""
    if isinstance(batch, dict):
        return [leaf for each in batch.values() for leaf in leaves(each)]
    return [leaf for each in batch for leaf in leaves(each)] if isinstance(batch, tuple) else [batch]


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    return len(next(iter(leaves(batch))))


def total(batch: Any) -> float:
    """Return the sum of all values."""
    return sum(float(np.asarray(leaf).sum(dtype=np.float64)) for leaf in leaves(batch))


def expected(name: str, data: Path) -> float:
    """Return the sum of the first batch, which all libraries must read."""
    if name != "criteo":  # all other formats have the same values; integers and eighths are added without rounding
        return float(np.load(data / "npy" / "part-0.npy", mmap_mode="r")[:BATCH].sum(dtype=np.float64))
    with (data / "criteo" / "part-0.criteo").open() as file:
        lines = [line.rstrip("\n").split("\t") for line in islice(file, BATCH)]
    decimal = sum(float(text or 0) for line in lines for text in line[:14])
    return decimal + sum(int(text or "-1", 16) for line in lines for text in line[14:])


if __name__ == "__main__":
    main()
