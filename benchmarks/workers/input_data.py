"""Write the same examples in every format, for benchmarks/input.py: ``python input_data.py FOLDER --rows 524288``."""

from __future__ import annotations

import argparse
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter
from input_schema import CATEGORIES, COLUMNS, COUNTS, DENSE, FILES, FORMATS, IDS
from pyarrow import csv


def main() -> None:
    """Write all files."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--rows", type=int, required=True)
    options.add_argument("--row-group", type=int, required=True)
    args = options.parse_args()
    for name in FORMATS:
        (args.folder / name).mkdir(parents=True)
    rows = args.rows // FILES
    for number in range(FILES):
        path = {name: str(args.folder / name / f"part-{number}.{name}") for name in FORMATS}
        ids, dense = examples(number, rows)
        table = pa.table(dict(zip(COLUMNS, [*ids.T, *dense.T], strict=True)))
        pq.write_table(table, path["parquet"], row_group_size=args.row_group)
        csv.write_csv(table, path["delimited"], csv.WriteOptions(include_header=False, quoting_style="none"))
        np.save(path["npy"], np.concatenate([ids, dense], axis=1, dtype=np.float32))
        records = protos(ids, dense)
        write_tfrecord(path["tfrecord"], records)
        writer = ArrayRecordWriter(path["array_record"], "group_size:1")
        for record in records:
            writer.write(record.tobytes())
        writer.close()
        tabs = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        csv.write_csv(clicks(number, rows), path["criteo"], tabs)


def examples(number: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids, int64 ``[rows, 4]``, and the dense values and label, float32 ``[rows, 9]``, of a file."""
    random = np.random.default_rng(number)
    ids = random.integers(2**21, 2**24, (rows, IDS))  # exact in float32, for .npy; four bytes each as varints
    return ids, random.integers(0, 1000, (rows, DENSE + 1)).astype(np.float32) / np.float32(8)


def protos(ids: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """Return the examples as ``tf.train.Example``, uint8 ``[rows, bytes]``: all have the same number of bytes."""
    varints = (ids[..., None] >> np.arange(0, 28, 7)) & 127 | np.array([128, 128, 128, 0])
    features = [
        feature("ids", 3, varints.astype(np.uint8).reshape(len(ids), -1)),
        feature("dense", 2, np.ascontiguousarray(dense[:, :DENSE]).view(np.uint8)),
        feature("label", 2, np.ascontiguousarray(dense[:, DENSE:]).view(np.uint8)),
    ]
    return field(1, np.concatenate(features, axis=1))


def feature(name: str, kind: int, values: np.ndarray) -> np.ndarray:
    """Return an entry of the map of features: its name, and a list of packed values."""
    key = np.tile(np.frombuffer(name.encode(), np.uint8), (len(values), 1))
    return field(1, np.concatenate([field(1, key), field(2, field(kind, field(1, values)))], axis=1))


def field(number: int, values: np.ndarray) -> np.ndarray:
    """Return a field of bytes in the encoding of protocol buffers."""
    size = values.shape[1]
    assert size < 2**14
    head = [number << 3 | 2, *([size] if size < 128 else [size & 127 | 128, size >> 7])]
    return np.concatenate([np.tile(np.array(head, np.uint8), (len(values), 1)), values], axis=1)


def write_tfrecord(path: str, records: np.ndarray) -> None:
    """Write records of equal length."""
    length = struct.pack("<Q", records.shape[1])
    head = length + struct.pack("<I", masked(google_crc32c.value(length)))
    with Path(path).open("wb") as file:
        for record in records:
            data = record.tobytes()
            file.write(head + data + struct.pack("<I", masked(google_crc32c.value(data))))


def masked(crc: int) -> int:
    """Return a CRC as TFRecord files have it."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def clicks(number: int, rows: int) -> pa.Table:
    """Return lines as in Criteo's logs; a tenth of the values is missing."""
    random = np.random.default_rng(number)
    columns = {"label": pa.array(random.integers(0, 2, rows))}
    for i in range(COUNTS):
        columns[f"count_{i}"] = pa.array(random.integers(0, 500, rows), mask=random.random(rows) < 0.1)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    for i in range(CATEGORIES):
        text = digits[random.integers(0, 16, (rows, 8))].view("S8").ravel()
        columns[f"category_{i}"] = pa.array(text.astype(object), pa.string(), mask=random.random(rows) < 0.1)
    return pa.table(columns)


if __name__ == "__main__":
    main()
