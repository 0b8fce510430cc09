"""Click logs in files, of which each rank reads its own rows: columns of Parquet, or Criteo's lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

import hvdkit as hk
from hvdkit.data.files.listing import list_files
from hvdkit.errors import describe

from .clicks import CRITEO_CATEGORIES, CRITEO_DENSE, Clicks

LABEL, LISTED = "label", 4  # the name of a column; the number of features that write_parquet writes as lists


@dataclass(frozen=True, kw_only=True)
class ClickFiles:
    """Examples of a click model in files; the attributes are those of :class:`inputs.clicks.Clicks`.

    A batch of a part is ``({"dense": float32 [b, d], "ids": int64 [b, f], "lists": {name: ragged int64}}, label)``.
    """

    name: str
    train: Any
    test: Any
    rows: tuple[int, ...]
    lists: tuple[str, ...] = ()
    best: None = None
    shuffle: Literal["blocks"] = "blocks"

    @property
    def held_out(self) -> int:
        """Number of examples that are not trained on."""
        return self.test.examples

    @property
    def examples(self) -> int:
        """Number of examples."""
        return self.train.examples + self.held_out

    @property
    def example(self) -> dict[str, Any]:
        """Inputs of two examples."""
        return self.train.structure[0]

    def part(self, held_out: bool) -> Any:
        """Return the source of one part."""
        return self.test if held_out else self.train


def click_files(data_dir: str, *, rows: int) -> ClickFiles:
    """Return the examples in a folder of Parquet files or of Criteo's click logs. The last file is held out.

    Parquet files have a column "label" of 0 and 1. Floats are dense features; integers and text are ids, taken modulo
    ``rows``; lists of these are features with any number of ids. Missing floats are 0.

    Raises:
        ValueError: There are not two files, or Parquet files lack a column.
    """
    files = sorted((file.url for file in list_files(data_dir)), key=_by_number)
    parquet = [file for file in files if file.endswith((".parquet", ".pq"))]
    files = parquet or files
    if len(files) < 2:
        remedy = "divide the examples into several files; the last one is held out"
        raise ValueError(describe("--data-dir", f"{data_dir} with {len(files)} file", "at least two", remedy))
    parts = [(hk.data.parquet if parquet else hk.data.criteo)(paths) for paths in (files[:-1], files[-1:])]
    if not parquet:
        train, test = (part.map(lambda batch: _of_criteo(batch, rows)) for part in parts)
        return ClickFiles(name=f"Criteo, {data_dir}", train=train, test=test, rows=(rows,) * CRITEO_CATEGORIES)
    columns = parts[0].structure
    lists = tuple(name for name in columns if isinstance(columns[name], tf.RaggedTensor))
    ids = [name for name in columns if name not in (LABEL, *lists) and columns[name].dtype.kind != "f"]
    if LABEL not in columns or not (ids or lists):
        got, remedy = f"the columns {[*columns]}", "write such columns, e.g. with models/write_files.py clicks"
        raise ValueError(describe("--data-dir", got, f"{LABEL!r}, and ids or lists of ids", remedy))
    train, test = (part.map(lambda batch: _of_parquet(batch, ids, lists, rows)) for part in parts)
    return ClickFiles(name=f"Parquet, {data_dir}", train=train, test=test, rows=(rows,) * len(ids), lists=lists)


def write_parquet(data: Clicks, folder: Path, files: int) -> None:
    """Write examples as Parquet files: the last features as lists of their ids without 0, in one column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path, part in _parts(data, folder, files, "clicks-{}.parquet"):
        single, listed = np.split(data.ids[part], [-LISTED], axis=1)
        dense = pa.FixedSizeListArray.from_arrays(data.dense[part].ravel(), data.dense.shape[1])
        columns = {LABEL: data.labels[part, 0], "dense": dense}
        columns |= {f"c{i}": column for i, column in enumerate(single.T)}
        columns["items"] = [row[row > 0] for row in listed]
        pq.write_table(pa.table(columns), path, row_group_size=4096)


def write_criteo(data: Clicks, folder: Path, files: int) -> None:
    """Write examples as lines of Criteo's click log, with counts instead of the numbers."""
    if (got := (data.dense.shape[1], data.ids.shape[1])) != (CRITEO_DENSE, CRITEO_CATEGORIES):
        expected = f"{CRITEO_DENSE} numbers and {CRITEO_CATEGORIES} ids"
        raise ValueError(describe("data", f"{got[0]} numbers and {got[1]} ids", expected, "generate these"))
    counts = np.rint(np.expm1(np.maximum(data.dense, 0))).astype(np.int64)
    for path, part in _parts(data, folder, files, "day_{}"):
        with path.open("w") as file:
            for label, row, ids in zip(data.labels[part, 0], counts[part], data.ids[part], strict=True):
                file.write("\t".join([str(int(label)), *map(str, row), *(f"{each:08x}" for each in ids)]) + "\n")


def _parts(data: Clicks, folder: Path, files: int, name: str) -> list[tuple[Path, np.ndarray]]:
    folder.mkdir(parents=True, exist_ok=True)
    parts = np.array_split(np.arange(data.examples), files)
    return [(folder / name.format(number), part) for number, part in enumerate(parts)]


def _of_criteo(batch: Any, rows: int) -> Any:
    inputs, label = batch
    dense = np.log1p(np.maximum(inputs["counts"], 0))
    ids = np.maximum(inputs["categories"], 0) % rows  # a missing category is 0
    return {"dense": dense, "ids": ids, "lists": {}}, label[:, None].astype(np.float32)


def _of_parquet(batch: dict[str, Any], ids: list[str], lists: tuple[str, ...], rows: int) -> Any:
    label = batch[LABEL].astype(np.float32)[:, None]
    floats = [batch[name] for name in batch if name not in (LABEL, *ids, *lists)]
    dense = [np.nan_to_num(each.reshape(len(label), -1).astype(np.float32)) for each in floats]
    single = [_hashed(batch[name], rows).reshape(len(label), -1) for name in ids]
    ragged = {name: batch[name].with_flat_values(_hashed(batch[name].flat_values.numpy(), rows)) for name in lists}
    inputs = {
        "dense": np.concatenate(dense or [np.ones_like(label)], axis=1),
        "ids": np.concatenate(single or [np.empty((len(label), 0), np.int64)], axis=1),
        "lists": ragged,
    }
    return inputs, label


def _hashed(ids: np.ndarray, rows: int) -> np.ndarray:
    """Return ids or text as int64 in ``[0, rows)``."""
    if ids.dtype == object:
        return tf.strings.to_hash_bucket_fast(ids, rows).numpy()
    return (ids % rows).astype(np.int64)


def _by_number(path: str) -> list[Any]:
    """Return a key that sorts ``day_10`` after ``day_9``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]
