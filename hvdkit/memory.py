"""Rows of a batch where TensorFlow takes them as they lie.

TensorFlow copies a NumPy array that it is given, and once more where the copy does not begin at a multiple of 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# As Eigen aligns, which TensorFlow computes with.
ALIGNMENT = 64
# Kinds and sizes of numbers that DLPack and TensorFlow know alike.
_SHARED = {"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return an array like ``np.empty``'s, whose memory begins where TensorFlow would put a tensor."""
    dtype = np.dtype(dtype)
    length = math.prod(shape) * dtype.itemsize
    raw = np.empty(length + ALIGNMENT, np.uint8)
    start = -_address(raw) % ALIGNMENT
    return raw[start : start + length].view(dtype).reshape(shape)


def tensor_of(rows: Any) -> Any:
    """Return an array as a tensor on the CPU, without a copy where :func:`aligned_empty` made it.

    The tensor holds the memory: whoever calls this writes to ``rows`` no more.
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
