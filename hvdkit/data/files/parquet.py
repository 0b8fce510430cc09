"""Parquet files: blocks are row groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hvdkit.data.aligned import aligned_empty
from hvdkit.data.files.listing import File
from hvdkit.data.files.source import Layout, Part
from hvdkit.data.files.storage import open_file
from hvdkit.errors import DataError, describe


class Ragged(NamedTuple):
    """A column of lists: the values of row i are ``values[splits[i]:splits[i + 1]]``."""

    values: np.ndarray
    splits: np.ndarray


class ParquetFormat:
    """Columns of Parquet files.

    Args:
        columns: Their names; None for all.
        fill: The value that replaces missing values, for each column that may have some.
    """

    name = "parquet"

    def __init__(self, columns: Sequence[str] | None, fill: Mapping[str, Any]):
        self._columns, self._fill = None if columns is None else list(columns), dict(fill)

    def scan(self, file: File) -> Layout:
        with opened(file) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
            names = schema.names if self._columns is None else self._columns
            if missing := [name for name in names if name not in schema.names]:
                raise ValueError(describe("columns", missing, f"columns of {file.url}: {schema.names}", "correct them"))
            kind = ", ".join(f"{name}: {schema.field(name).type}" for name in names)
            return Layout([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], kind)

    def load(self, file: File, layout: Layout, block: int) -> dict[str, np.ndarray | Ragged]:
        with opened(file) as parquet:
            table = parquet.read_row_group(block, self._columns, use_threads=False)
        return {name: self._column(file, block, name, table.column(name)) for name in table.column_names}

    def load_rows(self, file: File, layout: Layout, block: int, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        return self.load(file, layout, block), rows  # Parquet has no access to rows

    def take(self, parts: Sequence[Part], rows: int) -> dict[str, Any]:
        return {
            name: _taken([part._replace(block=part.block[name]) for part in parts], rows) for name in parts[0].block
        }

    def _column(self, file: File, block: int, name: str, chunks: pa.ChunkedArray) -> np.ndarray | Ragged:
        array = chunks.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # older pyarrow
            array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
        try:
            return _to_numpy(array, self._fill.get(name))
        except pa.ArrowException as error:
            raise DataError(f"column {name!r} of row group {block} of {file.url}: {error}") from error
        except TypeError as error:
            where = f"column {name!r} of {file.url}"
            remedy = f"leave it out with columns=, or convert it; for missing values pass fill={{{name!r}: value}}"
            raise TypeError(describe(where, str(error), "numbers, strings or lists of them", remedy)) from None


def opened(file: File) -> pq.ParquetFile:
    """Open a file, which must be as it was listed."""
    try:
        return pq.ParquetFile(open_file(file), pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file.url} is not a whole Parquet file: {error}") from error


def _to_numpy(array: pa.Array, fill: Any) -> np.ndarray | Ragged:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _to_numpy(array.dictionary_decode(), fill)
    if pa.types.is_fixed_size_list(kind) and not array.null_count:
        flat = _to_numpy(array.flatten(), fill)
        assert isinstance(flat, np.ndarray)
        return flat.reshape(len(array), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        values = _to_numpy(array.flatten(), fill)
        assert isinstance(values, np.ndarray)
        return Ragged(values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    if array.null_count and fill is not None:
        array = pc.fill_null(array, fill)
    if array.null_count and not pa.types.is_floating(kind):  # missing floats become NaN
        raise TypeError(f"{kind} with {array.null_count} missing values")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        array = array.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
    elif pa.types.is_temporal(kind):
        array = array.cast(pa.int64() if kind.bit_width == 64 else pa.int32())
    elif not (pa.types.is_primitive(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise TypeError(f"type {kind}")
    return array.to_numpy(zero_copy_only=False)


def _taken(parts: Sequence[Part], rows: int) -> Any:
    if isinstance(parts[0].block, Ragged):
        return _taken_ragged(parts, rows)
    first = parts[0].block
    taken = np.empty(rows, object) if first.dtype == object else aligned_empty((rows, *first.shape[1:]), first.dtype)
    for block, each, places in parts:
        taken[places] = block[each]
    return taken


def _taken_ragged(parts: Sequence[Part], rows: int) -> Any:
    import tensorflow as tf

    lengths = np.empty(rows, np.int64)
    for (_, splits), each, places in parts:
        lengths[places] = splits[each + 1] - splits[each]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    values = np.empty(int(ends[-1]) if rows else 0, parts[0].block.values.dtype)
    for block, each, places in parts:
        size = lengths[places]
        within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        values[np.repeat(starts[places], size) + within] = block.values[np.repeat(block.splits[each], size) + within]
    return tf.RaggedTensor.from_row_splits(values, np.concatenate([[0], ends]), validate=False)
