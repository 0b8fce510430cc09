"""What the examples of benchmarks/input.py are, for all workers."""

from __future__ import annotations

FORMATS = ("parquet", "tfrecord", "array_record", "delimited", "criteo", "npy")
FILES = 4  # of each format
BATCH = 4096
LARGE_BATCH = 2**16  # for the full shuffle of Parquet, which decodes almost all row groups for each batch
WINDOW = 2**16  # examples in shuffle buffers
IDS, DENSE = 4, 8
COLUMNS = {
    **{f"id_{i}": "int64" for i in range(IDS)},
    **{f"dense_{i}": "float32" for i in range(DENSE)},
    "label": "float32",
}
COUNTS, CATEGORIES = 13, 26  # of Criteo's logs
