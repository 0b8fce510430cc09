"""Columns of tables: from Arrow to arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hvdkit.data.aligned import Ragged

_NUMBERS = {pa.from_numpy_dtype(code).id for code in "bhilBHILefd"}
_READ_UNCHANGED = (
    pa.types.is_primitive,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)
# The types of text that more than 2 GiB fit in, for those of which less does, or whose layout is another one.
_LARGE = {
    pa.string(): pa.large_string(),
    pa.string_view(): pa.large_string(),
    pa.binary(): pa.large_binary(),
    pa.binary_view(): pa.large_binary(),
}


def kind_of(column: pa.DataType) -> str:
    """Return a column's type as text: the same for all types that :func:`to_numpy` turns into the same arrays.

    Writers choose between these by size: the indices of categories, and the offsets of strings and lists. Extension
    types, such as UUIDs and tensors, are those of their values as stored.

    Example:
        >>> kind_of(pa.dictionary(pa.int8(), pa.large_string())), kind_of(pa.large_list(pa.int64()))
        ('string', 'list<int64>')
    """
    if pa.types.is_dictionary(column):
        return kind_of(column.value_type)
    if isinstance(column, pa.BaseExtensionType):
        return kind_of(column.storage_type)
    if pa.types.is_list(column) or pa.types.is_large_list(column) or _is_list_view(column):
        return f"list<{kind_of(column.value_type)}>"
    if pa.types.is_fixed_size_list(column):
        return f"list<{kind_of(column.value_type)}>[{column.list_size}]"
    return str(column).removeprefix("large_").removesuffix("_view")


def _is_list_view(column: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(column) or pa.types.is_large_list_view(column))


def to_numpy(chunks: pa.ChunkedArray, fill: object) -> np.ndarray | Ragged:
    """Return a column as arrays. ``fill``, if not None, replaces missing values.

    Raises TypeError if the type is not supported, or values are missing.
    """
    if chunks.num_chunks == 1 and chunks.type.id in _NUMBERS and not chunks.null_count:
        values: np.ndarray = chunks.chunk(0).to_numpy()  # the usual case: the checks below take longer than this
        return values
    arrays = [_to_numpy(chunk, fill) for chunk in chunks.chunks or [pa.nulls(0, chunks.type)]]
    return arrays[0] if len(arrays) == 1 else _joined(arrays)


def _joined(arrays: Sequence[np.ndarray | Ragged]) -> np.ndarray | Ragged:
    """Return the chunks of a column as one; Arrow cannot join those of more than 2 GiB of text."""
    if not isinstance(arrays[0], Ragged):
        return np.concatenate(arrays)
    lengths = [np.diff(each.splits) for each in arrays if isinstance(each, Ragged)]
    values = [each.values for each in arrays if isinstance(each, Ragged)]
    return Ragged(np.concatenate(values), np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))


def _to_numpy(array: pa.Array, fill: object) -> np.ndarray | Ragged:
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _to_numpy(array.storage, fill)
    if pa.types.is_dictionary(kind):
        if (large := _LARGE.get(kind.value_type)) is not None:
            array = pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(large))
        return _to_numpy(array.dictionary_decode(), fill)
    if _is_list_view(kind):
        return _to_numpy(array.cast(pa.large_list(kind.value_type)), fill)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _to_numpy(array.cast(_LARGE[kind]), fill)
    if pa.types.is_fixed_size_list(kind) and not array.null_count:
        flat = _values(array, fill)
        return flat.reshape(len(array), kind.list_size, *flat.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        return Ragged(_values(array, fill), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    if array.null_count and fill is not None:
        try:
            value = pa.scalar(fill, kind)
        except (pa.ArrowException, OverflowError) as error:
            raise TypeError(f"{kind} with missing values and fill={fill!r}: {error}") from None
        if pa.types.is_integer(kind) and value.as_py() != fill:
            raise TypeError(f"{kind} with missing values and fill={fill!r}")
        array = pc.fill_null(array, value)
    if array.null_count and not pa.types.is_floating(kind):  # missing floats become NaN
        raise TypeError(f"{kind} with {array.null_count} missing values")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        array = array.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
    elif pa.types.is_temporal(kind):
        array = array.cast(pa.int64() if kind.bit_width == 64 else pa.int32())
    elif not any(is_kind(kind) for is_kind in _READ_UNCHANGED):
        raise TypeError(f"type {kind}")
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values


def _values(lists: pa.Array, fill: object) -> np.ndarray:
    """Return the values of all lists of an array, which must not be lists of any length themselves."""
    values = _to_numpy(lists.flatten(), fill)
    if isinstance(values, Ragged):
        raise TypeError(f"type {lists.type}, lists of lists")
    return values
