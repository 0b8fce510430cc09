"""Figures of hvdkit's file sources for benchmarks/input.py: bytes read per rank, resuming, an epoch of 10**10 rows."""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from input_peers import features
from input_schema import BATCH, COLUMNS, LARGE_BATCH
from timing import leave

import hvdkit as hk
from hvdkit.data.files.formats import FileLayout, Format
from hvdkit.data.files.listing import File
from hvdkit.data.files.source import FileSource

TEN_BILLION, BLOCK = 10**10, 2**16
LANES = 4  # the fewest that four ranks need; each reads up to two blocks more than its part


def main() -> None:
    """Write the figures of one check."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("check", choices=("bytes", "resume", "huge"))
    options.add_argument("format", help="a format; 'full' or 'blocks' for huge")
    options.add_argument("--order", choices=("in order", "lanes", "blocks", "full"), default="blocks")
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--data", type=Path, required=True)
    args = options.parse_args()
    if args.check == "huge":
        leave(args.folder, 0, huge(args.format, args.folder))
        return
    files = sorted(map(str, (args.data / args.format).glob("part-*")))
    leave(args.folder, 0, per_rank(args.format, files, args.order) if args.check == "bytes" else resume(args, files))


def source_of(name: str, files: Sequence[str]) -> FileSource:
    """Return the source of a format."""
    if name in ("tfrecord", "array_record"):
        return getattr(hk.data, name)(files, features())
    if name == "delimited":
        return hk.data.delimited(files, COLUMNS)
    return getattr(hk.data, name)(files)


def per_rank(name: str, files: Sequence[str], order: str) -> dict[str, float]:
    """Return the bytes that a rank of 1, 2 and 4 reads in an epoch, the most of all ranks, over 1/N of the bytes."""
    size_of_files = sum(Path(file).stat().st_size for file in files)
    settings: dict[str, Any] = {"shuffle": "full" if order in ("in order", "full") else "blocks"}
    settings["shuffle_seed"] = None if order in ("in order", "lanes") else 0
    if settings["shuffle"] == "blocks":
        settings["interleave"] = LANES
    rows = LARGE_BATCH if order == "full" else BATCH
    found = {}
    for size in (1, 2, 4):
        most = 0
        for rank in range(size):
            batches = hk.data.GlobalBatches(source_of(name, files), rows, rank=rank, size=size, **settings)
            before = bytes_read()
            for _ in batches.one_epoch():
                pass
            most = max(most, bytes_read() - before)
        found[f"ranks_{size}"] = most / (size_of_files / size)
    return found


def bytes_read() -> int:
    """Return the bytes that this process has read so far, from files or their cache in memory."""
    return psutil.Process().io_counters().read_chars


def resume(args: argparse.Namespace, files: Sequence[str]) -> dict[str, float]:
    """Return the seconds to the first batch of an epoch, and to the first after 90 % of it."""
    source = source_of(args.format, files)
    mode = "full" if args.order == "full" else "blocks"
    seconds = []
    for part in (0.5, 0, 0.9):  # the first is not counted
        batches = hk.data.GlobalBatches(source, BATCH, shuffle_seed=0, shuffle=mode, rank=0, size=1)
        started = time.perf_counter()
        batches.restore(batches.state_at(int(part * (batches.steps_per_epoch or 0))))
        next(batches)
        seconds.append(time.perf_counter() - started)
    return {"late": seconds[2], "start": seconds[1]}


class HugeFormat(Format):
    """Rows that are computed: each is its own number. Only the order of the rows costs time and memory."""

    name = "huge"

    def scan(self, file: File) -> FileLayout:
        """Return the layout of 10 billion rows in blocks."""
        full, rest = divmod(TEN_BILLION, BLOCK)
        return FileLayout([BLOCK] * full + [rest] * (rest > 0), "row: int64", 8 * BLOCK)

    def load_rows(self, file: File, layout: FileLayout, rows: np.ndarray) -> np.ndarray:
        """Return rows."""
        return rows


def huge(mode: Any, folder: Path) -> dict[str, float]:
    """Return the cost of the order of 10 billion rows: memory, the first batch, positions per second and core."""
    (folder / "rows").touch()
    next(hk.data.GlobalBatches(np.zeros(2), 2, rank=0, size=1))  # imports what batches need
    hk.data.npy  # noqa: B018
    before = peak_mb()
    started = time.perf_counter()
    source = FileSource(str(folder / "rows"), HugeFormat())
    batches = hk.data.GlobalBatches(source, BLOCK, shuffle_seed=0, shuffle=mode, rank=0, size=1)
    first = next(batches)
    seconds = time.perf_counter() - started
    assert len(np.unique(first)) == BLOCK
    order = source.order(batches.plan.shuffle, 0, BLOCK)
    assert order is not None
    order(np.arange(BLOCK))
    positions, cpu = 0, time.process_time()
    while time.process_time() - cpu < 1:
        positions += len(order(np.arange(positions, positions + BLOCK)))
    cpu = time.process_time() - cpu
    return {"mb": peak_mb() - before, "first": seconds, "ns": 1e9 * cpu / positions, "per_second": positions / cpu}


def peak_mb() -> float:
    """Return the most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
