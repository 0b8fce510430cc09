"""NumPy's .npy files, mapped into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.data.files.columns import taken
from hvdkit.data.files.listing import File
from hvdkit.data.files.records import BLOCK_BYTES, rows_of_blocks
from hvdkit.data.files.source import BlockRows, FileLayout
from hvdkit.data.files.storage import opened
from hvdkit.errors import DataError


class NpyFormat:
    """Rows of arrays ``[n, ...]``, one array per file."""

    name = "npy"
    suffixes: tuple[str, ...] = (".npy",)
    reads_rows = True

    def scan(self, file: File) -> FileLayout:
        array = _mapped(file)
        kind = f"{array.dtype}{list(array.shape[1:])}"
        return FileLayout(rows_of_blocks(len(array), array.nbytes), kind, BLOCK_BYTES)

    def load(self, file: File, layout: FileLayout, block: int) -> np.ndarray:
        first = block * layout.block_rows[0]
        return np.array(_mapped(file)[first : first + layout.block_rows[block]])

    def load_rows(self, file: File, layout: FileLayout, block: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _mapped(file)[block * layout.block_rows[0] + rows], np.arange(len(rows))

    def take(self, parts: Sequence[BlockRows], rows: int) -> Any:
        return taken(parts, rows)


def _mapped(file: File) -> np.ndarray:
    with opened(file) as open_file:
        if open_file.path is None:
            raise DataError(f"{file.url}: .npy files must be local; copy them, or mount the store")
        try:
            array = np.load(open_file.path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise DataError(f"{file.url} is not a whole .npy file of numbers: {error}") from error
    if array.ndim == 0:
        raise DataError(f"{file.url} has a single value, expected an array [n, ...]")
    return array
