"""NumPy's .npy files: local ones are mapped into memory, of others the rows that are needed are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from hvdkit.data.aligned import aligned_empty
from hvdkit.data.files.columns import taken
from hvdkit.data.files.filesystems import shown
from hvdkit.data.files.formats import BlockRows, FileLayout, require_rows
from hvdkit.data.files.listing import File
from hvdkit.data.files.records import BLOCK_BYTES, read_pieces, rows_of_blocks
from hvdkit.data.files.storage import OpenFile, opened_as
from hvdkit.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf


class NpyFormat:
    """Rows of arrays ``[n, ...]``, one array per file."""

    name = "npy"
    suffixes: tuple[str, ...] = (".npy",)
    reads_rows = True

    def scan(self, file: File) -> FileLayout:
        with opened_as(file, _Array) as found:
            array = found.array
        kind = f"{array.dtype.newbyteorder('=')}{list(array.shape[1:])}"
        return FileLayout(rows_of_blocks(len(array), array.nbytes), kind, BLOCK_BYTES)

    def load(self, file: File, layout: FileLayout, block: int) -> np.ndarray:
        return self.load_rows(file, layout, layout.rows_of(block))

    def load_rows(self, file: File, layout: FileLayout, rows: np.ndarray) -> np.ndarray:
        with opened_as(file, _Array) as found:
            array = found.rows(rows)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    def take(self, parts: Sequence[BlockRows], rows: int) -> np.ndarray | tf.RaggedTensor:
        return taken(parts, rows)


class _Header(NamedTuple):
    """What the header of an array ``[n, ...]`` says, if the file has as many bytes."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype
    start: int

    @property
    def nbytes(self) -> int:
        """The number of bytes of the array, in Python's integers, which do not wrap."""
        return math.prod(self.shape) * self.dtype.itemsize


def _header_of(file: OpenFile) -> _Header:
    """Read the header of a file.

    Raises:
        DataError: The file is no array ``[n, ...]``, or is shorter than its header claims.
    """
    url = file.file.url
    size = file.file.size
    if file.read(0, min(size, 4)) == b"PK\x03\x04":
        raise DataError(f"{url} is an archive of arrays (.npz); save each with np.save")
    try:
        stream = file.stream()
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        header = _Header(*read(stream), stream.tell())
        if header.dtype.hasobject:
            raise ValueError("it has Python objects")
        if header.dtype.itemsize == 0:
            raise ValueError(f"its values, {header.dtype}, have no bytes")
        if any(each < 0 for each in header.shape):
            raise ValueError(f"its shape is {header.shape}")
        np.empty((0, *header.shape[1:]), header.dtype)  # raises if NumPy has no such arrays
        if header.start + header.nbytes > size:
            raise ValueError(f"it has {size} bytes instead of {header.start + header.nbytes}")
    except DataError:
        raise
    except Exception as error:  # NumPy evaluates the text of the header
        reason = error if isinstance(error, ValueError) else shown(error)
        raise DataError(f"{url} is not a whole .npy file of numbers: {reason}") from error
    if not header.shape:
        raise DataError(f"{url} has a single value, expected an array [n, ...]")
    for each in header.shape:  # with a 0 among them, the array is empty, however large they are
        require_rows(file.file, each)
    return header


class _RemoteRows:
    """An array ``[n, ...]`` in a remote file, of which rows can be read."""

    def __init__(self, file: OpenFile, header: _Header):
        if header.is_fortran and len(header.shape) > 1:
            problem = "its columns are contiguous, not its rows; save np.ascontiguousarray(array)"
            raise DataError(f"{file.file.url} is not a whole .npy file of numbers: {problem}")
        self._file = file
        self._start = header.start
        self.shape = header.shape
        self.dtype = header.dtype
        self.nbytes = header.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Return rows, ascending."""
        starts = self._start + rows * (self.nbytes // max(1, len(self)))
        pieces = read_pieces(self._file, starts, starts + self.nbytes // max(1, len(self)))
        return np.frombuffer(b"".join(pieces), self.dtype).reshape(len(rows), *self.shape[1:])


class _Array:
    """An open .npy file; a local one is mapped into memory."""

    def __init__(self, file: OpenFile):
        self._file = file
        header = _header_of(file)
        self.array: np.ndarray | _RemoteRows
        if file.path is None:
            self.array = _RemoteRows(file, header)
            return
        order: Literal["C", "F"] = "F" if header.is_fortran else "C"
        self._start = header.start
        try:
            mapped = np.memmap(file.path, header.dtype, "r", header.start, header.shape, order)
        except ValueError as error:
            raise DataError(f"{file.file.url} is not a whole .npy file of numbers: {error}") from error
        self.array = mapped.view(np.ndarray)

    def close(self) -> None:
        """Close the file; the map ends with its last array."""
        self._file.close()

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Return rows, ascending. Runs of them are read, which asks for no other page."""
        array = self.array
        if isinstance(array, _RemoteRows):
            return array.rows(rows)
        if rows[-1] - rows[0] != len(rows) - 1 or not array.flags.c_contiguous:
            # A map of what was cut off would end the process with SIGBUS, and still does if a file is cut right here.
            self._file.require_whole()
            found: np.ndarray = array[rows]
            return found
        found = aligned_empty((len(rows), *array.shape[1:]), array.dtype)
        start = self._start + int(rows[0]) * (array.nbytes // len(array))
        self._file.read_into(start, memoryview(found.reshape(-1).view(np.uint8).data))
        return found
