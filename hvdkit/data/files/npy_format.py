"""NumPy's .npy files: local ones are mapped into memory, of others the rows that are needed are read."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from hvdkit.data.aligned import aligned_empty
from hvdkit.data.files.filesystems import shown
from hvdkit.data.files.formats import FileLayout, Format, require_rows
from hvdkit.data.files.listing import File
from hvdkit.data.files.records import BLOCK_BYTES, read_pieces, rows_of_blocks
from hvdkit.data.files.storage import FileStream, OpenFile, opened_as
from hvdkit.errors import DataError


class NpyFormat(Format):
    """Rows of arrays ``[n, ...]``, one array per file."""

    name = "npy"
    suffixes: tuple[str, ...] = (".npy",)

    def scan(self, file: File) -> FileLayout:
        with opened_as(file, _Array) as array:
            header = array.header
        kind = f"{header.dtype.newbyteorder('=')}{list(header.shape[1:])}"
        return FileLayout(rows_of_blocks(header.shape[0], header.nbytes), kind, BLOCK_BYTES)

    def load_rows(self, file: File, layout: FileLayout, rows: np.ndarray) -> np.ndarray:
        with opened_as(file, _Array) as found:
            array = found.rows(rows)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


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
    """Read the header of a file; DataError if it is no array ``[n, ...]``, or shorter than its header claims."""
    url = file.file.url
    size = file.file.size
    if file.read(0, min(size, 4)) == b"PK\x03\x04":
        raise DataError(f"{url} is an archive of arrays (.npz); save each with np.save")
    try:
        stream = FileStream(file)
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


class _Array:
    """An open .npy file; a local one is mapped into memory."""

    def __init__(self, file: OpenFile):
        self._file = file
        self.header = header = _header_of(file)
        self._mapped: np.ndarray | None = None
        if file.path is None:
            if header.is_fortran and len(header.shape) > 1:
                problem = "its columns are contiguous, not its rows; save np.ascontiguousarray(array)"
                raise DataError(f"{file.file.url} is not a whole .npy file of numbers: {problem}")
            return
        order: Literal["C", "F"] = "F" if header.is_fortran else "C"
        try:
            mapped = np.memmap(file.path, header.dtype, "r", header.start, header.shape, order)
        except ValueError as error:
            raise DataError(f"{file.file.url} is not a whole .npy file of numbers: {error}") from error
        self._mapped = mapped.view(np.ndarray)

    def close(self) -> None:
        """Close the file; the map ends with its last array."""
        self._file.close()

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Return rows, ascending. Runs of them are read, which asks for no other page."""
        header = self.header
        row_bytes = header.nbytes // max(1, header.shape[0])
        if self._mapped is None:
            starts = header.start + rows * row_bytes
            pieces = read_pieces(self._file, starts, starts + row_bytes)
            return np.frombuffer(b"".join(pieces), header.dtype).reshape(len(rows), *header.shape[1:])
        if rows[-1] - rows[0] != len(rows) - 1 or not self._mapped.flags.c_contiguous:
            # A map of what was cut off would end the process with SIGBUS, and still does if a file is cut right here.
            self._file.require_whole()
            found: np.ndarray = self._mapped[rows]
            return found
        found = aligned_empty((len(rows), *header.shape[1:]), header.dtype)
        self._file.read_into(header.start + int(rows[0]) * row_bytes, memoryview(found.reshape(-1).view(np.uint8).data))
        return found
