"""Columns of tables: from Arrow to arrays, and from blocks to batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hvdkit.data.aligned import aligned_empty
from hvdkit.data.files.source import BlockRows


class Ragged(NamedTuple):
    """A column of lists: the values of row i are ``values[splits[i]:splits[i + 1]]``."""

    values: np.ndarray
    splits: np.ndarray


def to_numpy(chunks: pa.ChunkedArray, fill: Any) -> np.ndarray | Ragged:
    """Return a column as arrays.

    Args:
        fill: What replaces missing values; None if there are none.

    Raises:
        TypeError: The type is not supported, or values are missing.
    """
    array = chunks.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    return _to_numpy(array, fill)


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


def taken(parts: Sequence[BlockRows], rows: int) -> Any:
    """Return a batch of ``rows`` rows of a column: an array, or a ``tf.RaggedTensor``."""
    if isinstance(parts[0].block, Ragged):
        return _taken_ragged(parts, rows)
    first = parts[0].block
    batch = np.empty(rows, object) if first.dtype == object else aligned_empty((rows, *first.shape[1:]), first.dtype)
    for block, each, places in parts:
        batch[places] = block[each]
    return batch


def _taken_ragged(parts: Sequence[BlockRows], rows: int) -> Any:
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
