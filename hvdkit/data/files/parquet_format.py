"""Parquet files: blocks are row groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hvdkit.data.files.columns import Ragged, taken, to_numpy
from hvdkit.data.files.listing import File
from hvdkit.data.files.source import BlockRows, FileLayout
from hvdkit.data.files.storage import opened
from hvdkit.errors import DataError, describe


class ParquetFormat:
    """Columns of Parquet files.

    Args:
        columns: Their names; None for all.
        fill: The value that replaces missing values, for each column that may have some.
    """

    name = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq")
    reads_rows = False

    def __init__(self, columns: Sequence[str] | None, fill: Mapping[str, Any]):
        self._columns, self._fill = None if columns is None else list(columns), dict(fill)

    def scan(self, file: File) -> FileLayout:
        with opened_parquet(file) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
            names = schema.names if self._columns is None else self._columns
            if missing := [name for name in names if name not in schema.names]:
                raise ValueError(describe("columns", missing, f"columns of {file.url}: {schema.names}", "correct them"))
            kind = ", ".join(f"{name}: {schema.field(name).type}" for name in names)
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            largest = max((group.total_byte_size for group in groups), default=0)
            return FileLayout([group.num_rows for group in groups], kind, largest)

    def load(self, file: File, layout: FileLayout, block: int) -> dict[str, np.ndarray | Ragged]:
        with opened_parquet(file) as parquet:
            try:
                table = parquet.read_row_group(block, self._columns, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"row group {block} of {file.url} is damaged: {error}") from error
        return {name: self._column(file, block, name, table.column(name)) for name in table.column_names}

    def load_rows(self, file: File, layout: FileLayout, block: int, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        return self.load(file, layout, block), rows  # Parquet has no access to rows

    def take(self, parts: Sequence[BlockRows], rows: int) -> dict[str, Any]:
        return {name: taken([part._replace(block=part.block[name]) for part in parts], rows) for name in parts[0].block}

    def _column(self, file: File, block: int, name: str, chunks: pa.ChunkedArray) -> np.ndarray | Ragged:
        try:
            return to_numpy(chunks, self._fill.get(name))
        except pa.ArrowException as error:
            raise DataError(f"column {name!r} of row group {block} of {file.url}: {error}") from error
        except TypeError as error:
            where = f"column {name!r} of {file.url}"
            remedy = f"leave it out with columns=, or convert it; for missing values pass fill={{{name!r}: value}}"
            raise TypeError(describe(where, str(error), "numbers, strings or lists of them", remedy)) from None


@contextlib.contextmanager
def opened_parquet(file: File) -> Iterator[pq.ParquetFile]:
    """Open a file, which must be as it was listed."""
    with opened(file) as open_file:
        try:
            parquet = pq.ParquetFile(open_file.for_library(), pre_buffer=False)
        except pa.ArrowInvalid as error:
            raise DataError(f"{file.url} is not a whole Parquet file: {error}") from error
        with parquet:
            yield parquet
