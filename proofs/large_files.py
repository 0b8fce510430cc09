"""Parquet files of random examples for proofs/large_input.py, written by several processes.

The rows depend on their number only, so files that exist can be used again.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import Progress

FEATURES, ITEMS, MOST_ITEMS = 256, 100_000, 16
ROW_BYTES = 1059  # of which 1,024 are features


@dataclass(frozen=True)
class Files:
    """A folder of Parquet files.

    Attributes:
        rows: in all files.
        count: number of files.
        group_rows: rows of a row group.
    """

    folder: Path
    rows: int
    count: int
    group_rows: int

    @classmethod
    def of(cls, folder: Path, gigabytes: float) -> Files:
        """Return files of about this size: 40 files, and row groups of at most 18 MB, at least four in a file."""
        rows = max(4096, int(gigabytes * 1e9 / ROW_BYTES))
        return cls(folder / f"{rows}-rows", rows, count=40, group_rows=min(16_384, rows // 160))

    @property
    def paths(self) -> list[Path]:
        return [self.folder / f"part-{number:05}.parquet" for number in range(self.count)]

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def rows_of(self, number: int) -> range:
        """Return the ids in a file."""
        return range(number * self.rows // self.count, (number + 1) * self.rows // self.count)

    def write(self) -> None:
        """Write the files that do not exist, with a progress bar."""
        self.folder.mkdir(parents=True, exist_ok=True)
        missing = [number for number in range(self.count) if not self._is_complete(number)]
        console, spawn = Console(stderr=True), multiprocessing.get_context("spawn")
        with (
            concurrent.futures.ProcessPoolExecutor(os.cpu_count(), spawn) as pool,
            Progress(console=console, disable=not console.is_terminal) as bar,
        ):
            task = bar.add_task("writing files", total=self.rows)
            bar.advance(task, self.rows - sum(len(self.rows_of(number)) for number in missing))
            for done in concurrent.futures.as_completed([pool.submit(self._write, number) for number in missing]):
                bar.advance(task, done.result())
        print(f"{self.folder}: {self.count} files, {self.bytes / 1e9:.2f} GB", file=sys.stderr, flush=True)

    def forget(self) -> None:
        """Remove the files from the system's page cache, so that the next run reads them from the disk."""
        for path in self.paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def _is_complete(self, number: int) -> bool:
        path = self.paths[number]
        return path.exists() and pq.read_metadata(path).num_rows == len(self.rows_of(number))

    def _write(self, number: int) -> int:
        rows, path = self.rows_of(number), self.paths[number]
        unfinished = path.with_suffix(".unfinished")
        with pq.ParquetWriter(unfinished, _SCHEMA, compression="snappy", use_dictionary=False) as writer:
            for first in range(rows.start, rows.stop, self.group_rows):
                writer.write_table(_group(first, min(self.group_rows, rows.stop - first)), self.group_rows)
        unfinished.replace(path)
        return len(rows)


_SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "features": pa.list_(pa.field("element", pa.float32(), nullable=False), FEATURES),
        "items": pa.list_(pa.int32()),
        "label": pa.float32(),
    }
)


def _group(first: int, rows: int) -> pa.Table:
    """Return the rows from ``first`` on: the label is 1 if a fixed sum of the features and items is positive."""
    chance = np.random.default_rng((20, first))
    features = chance.random((rows, FEATURES), np.float32) * 2 - 1
    lengths = chance.integers(0, MOST_ITEMS, rows)
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    items = (ITEMS * chance.random(splits[-1]) ** 3).astype(np.int32)  # small ids are frequent
    liked = np.concatenate([[0], np.cumsum(np.where(items % 3 == 0, 1.0, -0.3))])
    score = features @ np.cos(np.arange(FEATURES, dtype=np.float32)) / 4 + liked[splits[1:]] - liked[splits[:-1]]
    columns = [
        pa.array(np.arange(first, first + rows)),
        pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), type=_SCHEMA.field("features").type),
        pa.ListArray.from_arrays(pa.array(splits), pa.array(items)),
        pa.array((score > 0).astype(np.float32)),
    ]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)
