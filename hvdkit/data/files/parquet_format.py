"""Parquet files: blocks are row groups."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hvdkit.data.aligned import Ragged
from hvdkit.data.files.columns import kind_of, to_numpy
from hvdkit.data.files.formats import FileLayout, Format, require_rows
from hvdkit.data.files.listing import File
from hvdkit.data.files.path_columns import PathColumns, columns_in
from hvdkit.data.files.storage import FileStream, OpenFile, opened_as
from hvdkit.errors import DataError, describe

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_INDEX_BYTES = 4  # at most, of each value in a dictionary; of the length of each text
_MOST_TEXT_IN_LISTS = 2**31 - 1  # bytes in a row group: Arrow has more of them in several parts
_ROWS_PER_BYTE = 2**31  # a run of equal values takes a few bytes
_END = 8  # bytes: the length of the footer, and a magic number
_SIGNATURE = 28  # bytes
_PER_STRING = sys.getsizeof(b"") + 8  # bytes of Python's object, and of the reference to it


class ParquetFormat(Format):
    """Columns of Parquet files; the arguments are those of ``hk.data.parquet``."""

    name = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq")
    reads_rows = False

    def __init__(self, columns: Sequence[str] | None, fill: Mapping[str, object]):
        self._columns = None if columns is None else list(columns)
        self._fill = dict(fill)

    def scan(self, file: File) -> FileLayout:
        with opened_as(file, _opened) as opened:
            schema = opened.schema
            metadata = opened.metadata
            in_folders = columns_in(file.url)  # of the path; those that the file has as well count as the file's
            names = schema.names if self._columns is None else self._columns
            names = [name for name in names if name in schema.names or name not in in_folders]
            if wrong := [name for name in names if schema.names.count(name) != 1]:
                expected = f"columns of {file.url}, which has each once: {schema.names}"
                raise ValueError(describe("columns", wrong, expected, "correct them"))
            if unknown := [name for name in self._fill if name not in names and name not in in_folders]:
                raise ValueError(describe("fill", unknown, f"columns that are read: {names}", "correct them"))
            opened.require_readable(names)
            self._check_missing(file, opened, names)
            kind = ", ".join(f"{name}: {kind_of(schema.field(name).type)}" for name in names)
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            leaves = _leaves(metadata.schema, names)
            _require_short_texts(file, metadata.schema, groups, leaves)
            largest = max((_memory(metadata.schema, group, leaves) for group in groups), default=0)
            rows = [require_rows(file, group.num_rows, per_byte=_ROWS_PER_BYTE) for group in groups]
            require_rows(file, sum(rows), per_byte=_ROWS_PER_BYTE)
            return FileLayout(rows, kind, largest)

    def load(self, file: File, layout: FileLayout, block: int) -> dict[str, np.ndarray | Ragged]:
        with opened_as(file, _opened) as opened:
            names = self._columns
            if names is not None:  # the others are in the names of folders
                names = [name for name in names if name in opened.schema.names]
            table = opened.read(block, names)
            dates = [name for name in table.column_names if name in opened.int96]
        columns = {}
        for name in table.column_names:
            chunks = table.column(name)
            where = f"column {name!r} of row group {block} of {file.url}"
            if len(chunks) != layout.block_rows[block]:
                raise DataError(f"{where} has {len(chunks)} rows, but the footer claims {layout.block_rows[block]}")
            try:
                columns[name] = to_numpy(chunks, self._fill.get(name))
            except pa.ArrowException as error:
                raise DataError(f"{where}: {error}") from error
            except TypeError as error:
                raise _unreadable(file, name, str(error)) from None
        if dates:
            self._check_int96(file, block, table, dates)
        return columns

    def folder_columns(self, names: Sequence[str]) -> PathColumns:
        return PathColumns(self._columns, self._fill, names)

    def _check_missing(self, file: File, opened: _Opened, names: Sequence[str]) -> None:
        """Raise TypeError if the footer counts values as missing that cannot be. It does not count those in lists."""
        metadata = opened.metadata
        for i in range(metadata.num_columns):
            name = metadata.schema.column(i).path
            if name in self._fill or name not in names:
                continue
            if not (kind := kind_of(opened.schema.field(name).type)).endswith(("float", "double")):
                statistics = [metadata.row_group(g).column(i).statistics for g in range(metadata.num_row_groups)]
                missing = sum(each.null_count or 0 for each in statistics if each is not None)
                if missing:
                    raise _unreadable(file, name, f"{kind} with {missing} missing values")

    def _check_int96(self, file: File, block: int, table: pa.Table, names: Sequence[str]) -> None:
        """Raise DataError for a time that is not a whole number of microseconds, or has too many.

        Arrow turns INT96, a day and a number of nanoseconds, into 64 bits modulo 2^64. So nanoseconds less 1,000 times
        microseconds are the rest also if both are out of range; milliseconds are always in range.
        """
        with opened_as(file, _opened_ns) as opened:
            nanoseconds = opened.read(block, names)
        with opened_as(file, _opened_ms) as opened:
            milliseconds = opened.read(block, names)
        for name in names:
            times = _integers(table.column(name))
            fine = _integers(nanoseconds.column(name))
            coarse = _integers(milliseconds.column(name))
            for wrong, problem in (
                (fine - 1000 * times != 0, "has nanoseconds, expected whole microseconds"),
                (times // 1000 != coarse, "is beyond 64 bits of microseconds"),
            ):
                if wrong.any():
                    row = _row_of(table.column(name), int(np.argmax(wrong)))
                    where = f"column {name!r} of {file.url}: the time (INT96) in row {row} of row group {block}"
                    raise DataError(f"{where} {problem}; leave it out with columns=, or write it as a timestamp")


def _leaves(schema: pq.ParquetSchema, names: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of the file's columns that each column of the table has: of lists and structs, those in it."""
    leaves: dict[str, list[int]] = {name: [] for name in names}
    for i in range(len(schema)):
        parts = schema.column(i).path.split(".")
        for length in range(1, len(parts) + 1):  # names may have dots
            if (name := ".".join(parts[:length])) in leaves:
                leaves[name].append(i)
    return leaves


def _require_short_texts(
    file: File, schema: pq.ParquetSchema, groups: Sequence[pq.RowGroupMetaData], leaves: Mapping[str, list[int]]
) -> None:
    """Raise DataError for more text in the lists of a row group than Arrow can read at once."""
    for name, inner in leaves.items():
        for i in inner:
            leaf = schema.column(i)
            if leaf.path == name or leaf.physical_type != "BYTE_ARRAY":
                continue
            for number, group in enumerate(groups):
                column = group.column(i)
                if (size := _memory_of_text(column) - _INDEX_BYTES * column.num_values) > _MOST_TEXT_IN_LISTS:
                    got = f"{size:,} bytes of text in lists"
                    expected = f"at most {_MOST_TEXT_IN_LISTS:,}"
                    where = f"column {name!r} of row group {number} of {file.url}"
                    raise DataError(describe(where, got, expected, "write row groups of fewer rows"))


def _memory(schema: pq.ParquetSchema, group: pq.RowGroupMetaData, leaves: Mapping[str, list[int]]) -> int:
    """Return the memory that columns of a row group take, approximately. Encoded, they may be much smaller."""
    size = 0
    for i in (i for inner in leaves.values() for i in inner):
        column = group.column(i)
        kind = schema.column(i)
        if (width := _WIDTHS.get(kind.physical_type)) is not None:
            size += width * column.num_values
        elif kind.logical_type.type == "FLOAT16":
            size += 2 * column.num_values
        else:
            size += _memory_of_text(column) + _PER_STRING * column.num_values
    return size


def _memory_of_text(column: pq.ColumnChunkMetaData) -> int:
    """Return the bytes of a column's strings: as encoded; of indices, at least as if all had the length of one."""
    encoded: int = column.total_uncompressed_size
    values: int = column.num_values
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


def _integers(column: pa.ChunkedArray) -> np.ndarray:
    """Return the times of a column, also of those in lists, as int64; 0 for missing ones."""
    array = column.combine_chunks()
    while not pa.types.is_timestamp(array.type):
        array = array.flatten()
    times: np.ndarray = pc.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return times


def _row_of(column: pa.ChunkedArray, value: int) -> int:
    """Return the row of a value of a column of times, or lists of them."""
    array = column.combine_chunks()
    return value if pa.types.is_timestamp(array.type) else pc.list_parent_indices(array)[value].as_py()


class _Opened:
    """An open Parquet file. ``unit`` is that of the times whose physical type is INT96.

    Attributes:
        schema: Of the file.
        metadata: The footer. The metadata of a column that is encrypted must not be looked at: pyarrow 26 aborts.
        int96: The names of the columns with times as INT96.
    """

    def __init__(self, file: OpenFile, unit: str):
        self._open_file = file
        self._url = url = file.file.url
        ends = file.read(max(0, file.file.size - _END), min(file.file.size, _END))
        if ends.endswith(b"PARE"):
            raise DataError(f"{url} is encrypted, and its footer, too; write it without encryption")
        try:
            self._file = pq.ParquetFile(
                file.path or FileStream(file),
                pre_buffer=False,
                page_checksum_verification=True,
                coerce_int96_timestamp_unit=unit,
            )
            self.schema = self._file.schema_arrow
            self.metadata = self._file.metadata
            schema = self.metadata.schema
            dates = {i for i in range(len(schema)) if schema.column(i).physical_type == "INT96"}
            leaves = _leaves(schema, self.schema.names) if dates else {}
            self.int96 = {name for name, inner in leaves.items() if dates.intersection(inner)}
        except FileNotFoundError:
            raise
        except UnicodeDecodeError as error:
            raise DataError(f"{url}: the name of a column is no UTF-8: {error}") from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{url} is not a whole Parquet file: {error}") from error
        # A file with encrypted columns and a plain footer has a signature after the footer.
        self._is_signed = int.from_bytes(ends[:4], "little") == self.metadata.serialized_size + _SIGNATURE

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._open_file.close()

    def require_readable(self, names: Sequence[str]) -> None:
        """Raise DataError if some of the columns are encrypted."""
        groups = range(self.metadata.num_row_groups) if self._is_signed else []
        for group in groups:
            for name in names:
                try:
                    next(self._file.iter_batches(1, [group], [name], use_threads=False), None)
                except (pa.ArrowException, OSError) as error:
                    problem = f"column {name!r} of {self._url} is encrypted, or damaged: {error}"
                    raise DataError(f"{problem}; leave it out with columns=") from error

    def read(self, group: int, columns: Sequence[str] | None) -> pa.Table:
        """Return a row group."""
        try:
            return self._file.read_row_group(group, columns, use_threads=False)
        except pa.ArrowNotImplementedError as error:  # of long texts whose size the footer does not have
            problem = f"row group {group} of {self._url} cannot be read at once: {error}"
            raise DataError(f"{problem}; write row groups with less than 2 GiB of text in lists") from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"row group {group} of {self._url} is damaged: {error}") from error


_opened = functools.partial(_Opened, unit="us")
_opened_ns = functools.partial(_Opened, unit="ns")
_opened_ms = functools.partial(_Opened, unit="ms")
