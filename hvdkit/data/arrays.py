"""A source of rows from arrays, memory-mapped files and other array-like objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import optree
import xxhash

from hvdkit.data.aligned import Nest, aligned_empty
from hvdkit.data.order import Order, Shuffle, shuffled_indices
from hvdkit.errors import describe

_SAMPLED_ROWS = 8


class Concatenated:
    """Several arrays, concatenated along their first axis without copying.

    For data in several memory-mapped files. Rows are read on demand.

    Args:
        parts: Arrays ``[n_i, ...]`` with the same dtype, and the same shape except along the first axis.

    Raises:
        TypeError: A part is a masked array with masked values.
        ValueError: ``parts`` is empty, or the shapes or dtypes differ.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> files = [np.zeros((2, 3)), np.ones((4, 3))]  # or np.load(file, mmap_mode="r") of several files
        >>> rows = hk.data.Concatenated(files)
        >>> len(rows), rows[np.array([1, 2])][:, 0].tolist()
        (6, [0.0, 1.0])
    """

    def __init__(self, parts: Sequence[np.ndarray]):
        if not parts:
            raise ValueError(describe("parts", "no array", "at least one", "pass a non-empty list"))
        kinds = {(part.shape[1:], part.dtype) for part in parts}
        if len(kinds) > 1:
            got = f"{len(kinds)} kinds: {sorted(map(str, kinds))}"
            remedy = "convert the parts to the same shape and dtype"
            raise ValueError(describe("parts", got, "one shape and one dtype", remedy))
        for i, part in enumerate(parts):
            _require_no_mask(f"parts[{i}]", part)
        self._parts = list(parts)
        self._starts = np.cumsum([0, *(len(part) for part in parts)])
        self.shape: tuple[int, ...] = (int(self._starts[-1]), *parts[0].shape[1:])
        self.dtype = parts[0].dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: np.ndarray | slice) -> np.ndarray:
        """Return the rows of a slice or of an integer array ``[m]`` as a new array ``[m, ...]``."""
        indices = np.arange(*key.indices(len(self))) if isinstance(key, slice) else np.asarray(key)
        is_valid = indices.ndim == 1
        if is_valid and indices.size:
            is_valid = indices.dtype.kind in "iu" and 0 <= indices.min() <= indices.max() < len(self)
        if not is_valid:
            expected = f"a slice or integers [m] from 0 to {len(self) - 1}"
            raise IndexError(describe("index", key, expected, "pass np.array([i]) for a row"))
        rows = np.empty((len(indices), *self.shape[1:]), self.dtype)
        parts = np.searchsorted(self._starts, indices, side="right") - 1
        for part in np.unique(parts):
            is_in_part = parts == part
            rows[is_in_part] = self._parts[part][indices[is_in_part] - self._starts[part]]
        return rows


class ArraySource:
    """A structure (tuple, list, dict, nested) of arrays ``[examples, ...]``.

    Random access: each batch depends only on its epoch and step, and only the requested rows are read.

    Attributes:
        examples: The length of the arrays.
    """

    def __init__(self, arrays: Nest):
        accessors, leaves, self._treedef = optree.tree_flatten_with_accessor(arrays)
        if not leaves:
            raise TypeError(describe("arrays", repr(arrays), "at least one array", "pass an array, or a tuple of them"))
        names = [accessor.codify("arrays") for accessor in accessors]
        self._columns = [_Column(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
        lengths = {column.name: column.length for column in self._columns}
        if len(set(lengths.values())) > 1:
            got = ", ".join(f"len({name}) = {n}" for name, n in lengths.items())
            remedy = "truncate them, or find the examples with missing values"
            raise ValueError(describe("arrays", got, "equal lengths", remedy))
        self.examples = self._columns[0].length
        self.structure = arrays

    def read(self, indices: np.ndarray) -> Nest:
        """Return a copy of the rows ``indices`` (int64, of any shape) of every array, in the original structure."""
        return optree.tree_unflatten(self._treedef, [column.read(indices) for column in self._columns])

    def order(self, shuffle: Shuffle, epoch: int, batch_size: int) -> Order | None:
        """Return the order of an epoch: a uniform permutation, which takes 4 bytes per example."""
        if shuffle.seed is None:
            return None
        return shuffled_indices(self.examples, (shuffle.seed, epoch)).__getitem__

    def batch_spec(self, rows: int | None) -> Nest:
        """Return the ``tf.TensorSpec`` structure of a batch of ``rows`` rows; None for any number."""
        import tensorflow as tf

        first = self.read(np.zeros(1, np.int64))
        return optree.tree_map(lambda array: tf.TensorSpec([rows, *array.shape[1:]], array.dtype), first)

    def identity(self, shuffle: Shuffle) -> dict[str, object]:
        """Return nothing more: seed and sizes determine the order."""
        return {}

    def fingerprint(self) -> dict[str, object]:
        """Return shapes, dtypes and a digest of up to 8 evenly spaced rows."""
        kinds, digest = digest_of_rows([column.read for column in self._columns], self.examples)
        names = [column.name for column in self._columns]
        return {"examples": self.examples, "arrays": dict(zip(names, kinds, strict=True)), "rows": digest}


class _Column:
    """One array of an :class:`ArraySource`; validated on construction."""

    def __init__(self, name: str, array: Any):
        self.name = name
        if callable(getattr(array, "numpy", None)):  # a TensorFlow tensor or variable
            array = array.numpy()
        elif hasattr(array, "to_numpy"):  # a pandas Series or DataFrame: its [] takes labels, not rows
            array = array.to_numpy()
        elif isinstance(array, np.ndarray):
            _require_no_mask(name, array)
            array = np.asarray(array)  # a memmap becomes a plain view of the same pages
        self._array = array
        self._is_numpy = isinstance(array, np.ndarray)
        self._is_h5py = type(array).__module__.startswith("h5py")
        try:
            self.length = len(array)
        except TypeError:
            got = f"{type(array).__name__} without a length"
            remedy = "convert it with np.asarray; a single value needs np.asarray([value])"
            raise TypeError(describe(name, got, "an array [examples, ...]", remedy)) from None
        if self.length == 0:
            raise ValueError(describe(name, "an empty data set", "at least one example", "check how it was read"))
        try:  # in the same way as batches, so that an unsupported source fails early and is named
            first = np.asarray(array[np.array([0])])
            if first.ndim == 0 or len(first) != 1:
                raise TypeError(f"one index gave the shape {first.shape}")
        except Exception as error:
            got = f"{type(array).__name__}, which failed to read row 0 ({error})"
            expected = "an array, or an object whose [] takes an integer array and returns those rows"
            remedy = (
                "pass dict(arrays)" if isinstance(array, Mapping) else "convert it with np.asarray"
            )  # np.load of .npz
            raise TypeError(describe(name, got, expected, remedy)) from error
        self._native = first.dtype.newbyteorder("=")
        if first.dtype.hasobject:
            remedy = "convert it, e.g. np.asarray(x, dtype='float32'), or pad rows of unequal length"
            raise TypeError(describe(name, "dtype object", "numbers, booleans or strings of one shape", remedy))
        # np.take is the fastest way to copy rows, but first copies an entire non-contiguous array.
        self._contiguous = self._is_numpy and array.flags.c_contiguous

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return a copy of the rows ``indices``, an array of any shape."""
        if self._contiguous:
            rows = aligned_empty((*indices.shape, *self._array.shape[1:]), self._array.dtype)
            # mode="raise" would buffer the output in a second array; the indices are known to be in range.
            self._array.take(indices, axis=0, out=rows, mode="clip")
        elif self._is_numpy:
            rows = self._array[indices]
        else:
            rows = self._read_ascending(indices)
        return rows if rows.dtype.isnative else rows.astype(self._native)

    def _read_ascending(self, indices: np.ndarray) -> np.ndarray:
        """Read with ascending unique indices: h5py requires them, and files are read fastest in order."""
        unique, inverse = np.unique(indices, return_inverse=True)
        inverse = inverse.reshape(indices.shape)  # NumPy 1 returns it flat
        first = int(unique[0])
        last = int(unique[-1])
        if self._is_h5py and last - first + 1 == len(unique):
            return np.asarray(self._array[first : last + 1])[inverse]  # one read instead of one per row
        return np.asarray(self._array[unique])[inverse]


def _require_no_mask(name: str, array: np.ndarray) -> None:
    if np.ma.is_masked(array):
        remedy = "pass .filled(value), and a weight of 0 for rows that should not count"
        raise TypeError(describe(name, "a masked array with masked values", "an array without", remedy))


def digest_of_rows(columns: Iterable[Callable[[np.ndarray], np.ndarray]], examples: int) -> tuple[list[str], int]:
    """Return dtype and shape of each column, and a digest of up to 8 evenly spaced rows of all columns.

    A column is a function that reads the rows with some indices, int64 ``[n]``, as an array ``[n, ...]``.

    Example:
        >>> digest_of_rows([np.ones((100, 3), np.float32).__getitem__], 100)[0]
        ['float32[100, 3]']
    """
    indices = (
        np.unique(np.linspace(0, examples - 1, _SAMPLED_ROWS).astype(np.int64)) if examples else np.zeros(0, np.int64)
    )
    hasher = xxhash.xxh3_64()
    kinds = []
    for read in columns:
        rows = np.ascontiguousarray(read(indices))
        kinds.append(f"{rows.dtype.name}{[examples, *rows.shape[1:]]}")
        hasher.update(repr(rows.tolist()).encode() if rows.dtype.hasobject else rows.tobytes())
    return kinds, hasher.intdigest()
