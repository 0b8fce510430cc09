"""Gather the rows of a model's outputs from all ranks, in the order of the data."""

from __future__ import annotations

import pickle
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.keras.shares import DataRank

Output: TypeAlias = "np.ndarray | tf.RaggedTensor | tf.SparseTensor"
"""Rows of one of a model's outputs, as Keras's ``predict`` returns them."""
_CHUNK_BYTES = 64 * 2**20
"""Bytes of each rank's predictions per exchange."""


def gather_rows(local: Output, rows: np.ndarray, *, keep: bool) -> Output:
    """Return the rows of all data ranks in the order of the data. Every rank must call it.

    Args:
        local: this rank's rows: an array of numbers or strings, a RaggedTensor or a SparseTensor.
        rows: the number of rows of each global batch.
        keep: whether this rank needs the result; without it, the result is meaningless.
    """
    is_numeric = isinstance(local, np.ndarray) and not local.dtype.hasobject
    data = np.ascontiguousarray(local).reshape(-1).view(np.uint8) if is_numeric else _pickled(local)
    parts = _gather_bytes(data, keep=keep)
    if not keep:
        return local
    numbers = [_row_numbers(rows, DataRank(index, len(parts))) for index in range(len(parts))]
    if is_numeric:
        ordered = np.empty((rows.sum(), *local.shape[1:]), local.dtype)
        for number, part in zip(numbers, parts, strict=True):
            ordered[number] = part.view(local.dtype).reshape(-1, *local.shape[1:])
        return ordered
    order = np.concatenate(numbers)
    return _joined([pickle.loads(part.tobytes()) for part in parts], order)


def number_of_local_rows(rows: np.ndarray) -> int:
    """Return how many rows this rank has, given the number of rows of each global batch."""
    return len(_row_numbers(rows, DataRank.local()))


def kind_of(output: object) -> tuple[str, tuple[int, ...]] | None:
    """Return a name for dtype and class of outputs, and their shape; None for what has no rows."""
    if isinstance(output, np.ndarray):
        return (output.dtype.name, output.shape) if output.ndim else None
    if isinstance(output, tf.RaggedTensor):
        inner = (int(output.ragged_rank), *(output.flat_values.shape[1:].as_list()))
        return f"ragged {output.dtype.name}", (int(output.nrows()), *inner)
    if isinstance(output, tf.SparseTensor):
        return f"sparse {output.dtype.name}", tuple(map(int, output.dense_shape))
    return None


def _gather_bytes(data: np.ndarray, *, keep: bool) -> list[np.ndarray]:
    """Return the bytes of all ranks; empty arrays unless ``keep``."""
    exchange = cluster.exchange(cluster.data_group())
    lengths = gather(exchange, "bytes of hk.predict's outputs", lambda: data.size)
    parts = [np.empty(length if keep else 0, np.uint8) for length in lengths]
    for start in range(0, max(lengths), _CHUNK_BYTES):
        chunks = exchange.allgather_bytes(data[start : start + _CHUNK_BYTES].tobytes())
        for part, chunk in zip(parts, chunks, strict=True):
            if keep:
                part[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
    return parts


def _pickled(output: Output) -> np.ndarray:
    """Return the bytes of strings, or of the arrays of a RaggedTensor or SparseTensor."""
    arrays: object = output
    if isinstance(output, tf.RaggedTensor):
        arrays = output.flat_values.numpy(), [splits.numpy() for splits in output.nested_row_splits]
    elif isinstance(output, tf.SparseTensor):
        arrays = output.indices.numpy(), output.values.numpy(), output.dense_shape.numpy()
    return np.frombuffer(pickle.dumps(arrays, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)


def _joined(parts: list[Any], order: np.ndarray) -> Output:
    """Join ranks' rows; row ``i`` of the joined parts is row ``order[i]`` of the result."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)[np.argsort(order)]
    if len(first) == 2:
        ragged = [tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False) for values, splits in parts]
        return tf.gather(tf.concat(ragged, 0), np.argsort(order))
    starts = np.cumsum([0, *(shape[0] for _, _, shape in parts)])
    indices = [
        np.column_stack([order[start + i[:, 0]], i[:, 1:]]) for start, (i, _, _) in zip(starts[:-1], parts, strict=True)
    ]
    shape = [len(order), *np.max([shape[1:] for _, _, shape in parts], axis=0)]
    values = np.concatenate([values for _, values, _ in parts])
    return tf.sparse.reorder(tf.SparseTensor(np.concatenate(indices), values, shape))


def _row_numbers(rows: np.ndarray, data_rank: DataRank) -> np.ndarray:
    """Return which rows of the complete data a rank has, given the rows of each global batch.

    Example:
        >>> _row_numbers(np.array([4, 3]), DataRank(1, 2)).tolist()
        [2, 3, 5, 6]
    """
    rows = rows.astype(np.int64)
    first = np.cumsum(rows) - rows
    start, end = data_rank.bounds(rows)
    return np.concatenate(list(map(np.arange, first + start, first + end)))
