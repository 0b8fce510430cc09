"""NumPy's .npy files: local ones are mapped into memory, of others the rows that are needed are read."""

from __future__ import annotations

import tokenize
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.data.aligned import aligned_empty
from hvdkit.data.files.columns import taken
from hvdkit.data.files.formats import BlockRows, FileLayout
from hvdkit.data.files.listing import File
from hvdkit.data.files.records import BLOCK_BYTES, read_pieces, rows_of_blocks
from hvdkit.data.files.storage import OpenFile, opened_as
from hvdkit.errors import DataError


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

    def take(self, parts: Sequence[BlockRows], rows: int) -> Any:
        return taken(parts, rows)


class _RemoteRows:
    """An array ``[n, ...]`` in a remote file, of which rows can be read."""

    def __init__(self, file: OpenFile):
        with file.for_library() as stream:
            version = np.lib.format.read_magic(stream)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            self.shape, is_fortran, self.dtype = read_header(stream)
            self._start = stream.tell()
        if is_fortran and len(self.shape) > 1:
            raise ValueError("its columns are contiguous, not its rows; save np.ascontiguousarray(array)")
        if self.dtype.hasobject:
            raise ValueError("it has Python objects")
        self._file, self.ndim = file, len(self.shape)
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        if self._start + self.nbytes > file.file.size:
            raise ValueError(f"it has {file.file.size} bytes instead of {self._start + self.nbytes}")

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Return rows, ascending."""
        starts = self._start + rows * (self.nbytes // max(1, len(self)))
        pieces = read_pieces(self._file, starts, starts + self.nbytes // max(1, len(self)))
        return np.frombuffer(b"".join(pieces), self.dtype).reshape(-1, *self.shape[1:])


class _Array:
    """An open .npy file; a local one is mapped into memory."""

    def __init__(self, file: OpenFile):
        self._file, url, path = file, file.file.url, file.path
        try:
            self.array: Any = _RemoteRows(file) if path is None else np.load(path, mmap_mode="r")
        except (ValueError, EOFError, tokenize.TokenError) as error:
            raise DataError(f"{url} is not a whole .npy file of numbers: {error}") from error
        if not isinstance(self.array, np.ndarray | _RemoteRows):
            raise DataError(f"{url} is an archive of arrays (.npz); save each with np.save")
        if self.array.ndim == 0:
            raise DataError(f"{url} has a single value, expected an array [n, ...]")
        if isinstance(self.array, np.memmap):
            self.array, self._start = self.array.view(np.ndarray), self.array.offset

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
            return array[rows]
        found = aligned_empty((len(rows), *array.shape[1:]), array.dtype)
        start = self._start + int(rows[0]) * (array.nbytes // len(array))
        self._file.read_into(start, memoryview(found.reshape(-1).view(np.uint8).data))
        return found
