"""Parquet files: blocks are row groups."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hvdkit.data.files.columns import Ragged, kind_of, taken_columns, to_numpy
from hvdkit.data.files.formats import BlockRows, FileLayout
from hvdkit.data.files.listing import File
from hvdkit.data.files.storage import OpenFile, opened_as
from hvdkit.errors import DataError, describe

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_INDEX_BYTES = 4  # at most, of each value in a dictionary
_PER_STRING = sys.getsizeof(b"") + 8  # bytes of Python's object, and of the reference to it


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
        with opened_as(file, _parquet) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
            names = schema.names if self._columns is None else self._columns
            if wrong := [name for name in names if schema.names.count(name) != 1]:
                expected = f"columns of {file.url}, which has each once: {schema.names}"
                raise ValueError(describe("columns", wrong, expected, "correct them"))
            if unknown := [name for name in self._fill if name not in names]:
                raise ValueError(describe("fill", unknown, f"columns that are read: {names}", "correct them"))
            self._check_missing(file, schema, metadata)
            kind = ", ".join(f"{name}: {kind_of(schema.field(name).type)}" for name in names)
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            largest = max((_memory(metadata.schema, group, names) for group in groups), default=0)
            return FileLayout([group.num_rows for group in groups], kind, largest)

    def load(self, file: File, layout: FileLayout, block: int) -> dict[str, np.ndarray | Ragged]:
        with opened_as(file, _parquet) as parquet:
            try:
                table = parquet.read_row_group(block, self._columns, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"row group {block} of {file.url} is damaged: {error}") from error
        return {name: self._column(file, block, name, table.column(name)) for name in table.column_names}

    def load_rows(self, file: File, layout: FileLayout, rows: np.ndarray) -> Any:
        raise NotImplementedError  # Parquet has no access to rows

    def take(self, parts: Sequence[BlockRows], rows: int) -> dict[str, Any]:
        return taken_columns(parts, rows)

    def _check_missing(self, file: File, schema: pa.Schema, metadata: pq.FileMetaData) -> None:
        """Raise TypeError if the footer counts values as missing that cannot be. It does not count those in lists."""
        for i in range(metadata.num_columns):
            name = metadata.schema.column(i).path
            if name in self._fill or (self._columns is not None and name not in self._columns):
                continue
            if name in schema.names and not (kind := kind_of(schema.field(name).type)).endswith(("float", "double")):
                statistics = [metadata.row_group(g).column(i).statistics for g in range(metadata.num_row_groups)]
                missing = sum(each.null_count or 0 for each in statistics if each is not None)
                if missing:
                    raise _unreadable(file, name, f"{kind} with {missing} missing values")

    def _column(self, file: File, block: int, name: str, chunks: pa.ChunkedArray) -> np.ndarray | Ragged:
        try:
            return to_numpy(chunks, self._fill.get(name))
        except pa.ArrowException as error:
            raise DataError(f"column {name!r} of row group {block} of {file.url}: {error}") from error
        except TypeError as error:
            raise _unreadable(file, name, str(error)) from None


def _memory(schema: pq.ParquetSchema, group: pq.RowGroupMetaData, names: Sequence[str]) -> int:
    """Return the memory that columns of a row group take, approximately. Encoded, they may be much smaller."""
    size, within = 0, tuple(f"{name}." for name in names)
    for i in range(group.num_columns):
        column, kind = group.column(i), schema.column(i)
        if kind.path not in names and not kind.path.startswith(within):
            continue
        if (width := _WIDTHS.get(kind.physical_type)) is not None:
            size += width * column.num_values
        elif kind.logical_type.type == "FLOAT16":
            size += 2 * column.num_values
        else:
            size += _memory_of_text(column) + _PER_STRING * column.num_values
    return size


def _memory_of_text(column: pq.ColumnChunkMetaData) -> int:
    """Return the bytes of a column's strings: as encoded; of indices, at least as if all had the length of one."""
    encoded, values = column.total_uncompressed_size, column.num_values
    if not column.has_dictionary_page or encoded > _INDEX_BYTES * values:
        return encoded
    try:
        ends = [column.statistics.min, column.statistics.max]
    except (AttributeError, ValueError, pa.ArrowException):  # no statistics, or no UTF-8
        return encoded
    return max(encoded, values * min(len(end) if isinstance(end, str | bytes) else 0 for end in ends))


def _unreadable(file: File, name: str, got: str) -> TypeError:
    remedy = f"leave it out with columns=, or convert it; for missing values pass fill={{{name!r}: value}}"
    return TypeError(describe(f"column {name!r} of {file.url}", got, "numbers, strings or lists of them", remedy))


def _parquet(file: OpenFile) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file.for_library(), pre_buffer=False, page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file.file.url} is not a whole Parquet file: {error}") from error
