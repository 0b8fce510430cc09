"""The arrays of batches, in memory that TensorFlow can use without copying.

TensorFlow copies NumPy arrays, and copies again if the first copy is not aligned to 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tensorflow as tf

Rows = TypeVar("Rows")
Nest: TypeAlias = Any
"""Arrays, tensors, or what stands for them, such as specs, in nested tuples, lists and dicts."""

# The alignment of Eigen, which TensorFlow uses.
ALIGNMENT = 64
# Kinds and sizes of numbers that both DLPack and TensorFlow support.
_SHARED = {"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}


class Ragged(NamedTuple):
    """A column of lists: the values of row i are ``values[splits[i]:splits[i + 1]]``."""

    values: np.ndarray
    splits: np.ndarray


def aligned_empty(shape: Sequence[int], dtype: npt.DTypeLike) -> np.ndarray:
    """Return an uninitialized array like ``np.empty``, aligned like a TensorFlow tensor; of objects, not aligned."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        return np.empty(shape, dtype)
    raw = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, raw, -_address(raw) % ALIGNMENT)


def tensor_of(rows: Rows) -> Rows | tf.Tensor:
    """Return an array as a CPU tensor, without copying arrays from :func:`aligned_empty`; return other rows unchanged.

    The tensor shares the memory: the caller must not write to ``rows`` afterwards.
    """
    import tensorflow as tf

    if not isinstance(rows, np.ndarray):
        return rows
    shared = rows.dtype.str[1:] in _SHARED and rows.size and rows.flags.c_contiguous and rows.flags.writeable
    if shared and _address(rows) % ALIGNMENT == 0:
        return tf.experimental.dlpack.from_dlpack(rows.__dlpack__())
    return tf.convert_to_tensor(rows)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
