"""What a format of files provides, and what is known of a file that was scanned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from hvdkit.data.files.listing import File

OnError = Literal["raise", "skip"]


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

    block: Any
    rows: np.ndarray | slice
    places: np.ndarray | slice


class Format(Protocol):
    """How files of one format are read. All methods may be called by several threads at once."""

    name: str
    suffixes: tuple[str, ...]  # of its files in a folder; empty for all
    reads_rows: bool  # without the rest of their block

    def scan(self, file: File) -> FileLayout:
        """Return what the file has; called once per file, by one of the ranks."""

    def load(self, file: File, layout: FileLayout, block: int) -> Any:
        """Read a block. The result is kept while its rows are needed."""

    def load_rows(self, file: File, layout: FileLayout, rows: np.ndarray) -> Any:
        """Read distinct, ascending rows of a file without the others, if ``reads_rows``; return a block of them."""

    def take(self, parts: Sequence[BlockRows], rows: int) -> Any:
        """Return a batch of ``rows`` rows: a structure of arrays."""
