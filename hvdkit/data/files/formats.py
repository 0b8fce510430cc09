"""What a format of files provides, and what is known of a file that was scanned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from hvdkit.data.aligned import Nest
from hvdkit.data.files.listing import File
from hvdkit.errors import DataError

OnError = Literal["raise", "skip"]
Block: TypeAlias = Any
"""Rows of a file as its format keeps them in memory: an array, a ``Ragged`` column, or columns by name."""
_MOST_ROWS = 2**47  # of a file; those of 65,000 files can be counted


def require_rows(file: File, rows: int, *, per_byte: int = 1) -> int:
    """Return the number of rows that a file claims to have, if it can have so many.

    What a file claims is trusted up to its real size, so that a forged header does not make a rank allocate more.

    Args:
        per_byte: The number of rows that a byte of the file can stand for: more than 1 if the format compresses rows.

    Raises:
        DataError: The number is negative or too high.
    """
    most = min(file.size * per_byte, _MOST_ROWS)
    if not 0 <= rows <= most:
        raise DataError(
            f"{file.url} claims to have {rows} rows, but can have at most {most} with its {file.size} bytes"
        )
    return rows


class FileLayout(NamedTuple):
    """What one file has, as found by :meth:`Format.scan`.

    Attributes:
        block_rows: The number of rows of each block, in the order of the file.
        kind: The columns and types as text, which must be the same in all files.
        largest_block: Its size in memory, in bytes.
        damaged: The numbers of the records that are skipped, ascending.
        problem: Why the file as a whole is skipped, or "".
        is_open: Whether the last line has no line end, as in a file that was cut.
    """

    block_rows: list[int]
    kind: str
    largest_block: int
    damaged: np.ndarray = np.array([], np.int64)
    problem: str = ""
    is_open: bool = False

    def rows_of(self, block: int) -> np.ndarray:
        """Return the rows of a block, int64, as numbers in the file. All blocks but the last have equally many."""
        return block * self.block_rows[0] + np.arange(self.block_rows[block])

    def record_numbers(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of the rows in the file, int64: damaged records have one, but are not rows."""
        # d_j is passed by the rows from d_j - j on.
        return rows + np.searchsorted(self.damaged - np.arange(len(self.damaged)), rows, side="right")


class BlockRows(NamedTuple):
    """Rows of a batch that come from one block.

    Attributes:
        block: What :meth:`Format.load` or :meth:`Format.load_rows` returned.
        rows: int64 ``[m]``: the rows in it; a slice if they follow each other, which is copied faster.
        places: int64 ``[m]``: their rows in the batch, or a slice.
    """

    block: Block
    rows: np.ndarray | slice
    places: np.ndarray | slice


class Format(Protocol):
    """How files of one format are read. All methods may be called by several threads at once."""

    name: str
    suffixes: tuple[str, ...]  # of its files in a folder; empty for all
    reads_rows: bool  # without the rest of their block

    def scan(self, file: File) -> FileLayout:
        """Return what the file has; called once per file, by one of the ranks."""

    def load(self, file: File, layout: FileLayout, block: int) -> Block:
        """Read a block. The result is kept while its rows are needed."""

    def load_rows(self, file: File, layout: FileLayout, rows: np.ndarray) -> Block:
        """Read distinct, ascending rows of a file without the others, if ``reads_rows``; return a block of them."""

    def take(self, parts: Sequence[BlockRows], rows: int) -> Nest:
        """Return a batch of ``rows`` rows: a structure of arrays."""
