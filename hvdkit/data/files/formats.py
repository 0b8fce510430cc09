"""What a format of files provides, and what is known of a file that was scanned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from hvdkit.data.aligned import Nest, Ragged, aligned_empty, tensor_of
from hvdkit.data.files.listing import File
from hvdkit.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

    from hvdkit.data.files.path_columns import PathColumns  # needs pyarrow, which arrays do not

OnError = Literal["raise", "skip"]
Block: TypeAlias = Any
"""Rows of a file as its format keeps them in memory: an array, a ``Ragged`` column, or columns by name."""
_MOST_ROWS = 2**47  # of a file; those of 65,000 files can be counted


def require_rows(file: File, rows: int, *, per_byte: int = 1) -> int:
    """Return the number of rows that a file claims to have, if it can have so many; otherwise raise DataError.

    What a file claims is trusted up to its real size, so that a forged header does not make a rank allocate more. A
    byte of the file can stand for ``per_byte`` rows: more than 1 if the format compresses rows.
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


class Format(ABC):
    """How files of one format are read. All methods may be called by several threads at once.

    Attributes:
        name: The name of the public function.
        suffixes: Those of its files in a folder; empty for all.
        reads_rows: Whether rows can be read without the rest of their block.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    reads_rows = True

    @abstractmethod
    def scan(self, file: File) -> FileLayout:
        """Return what the file has; called once per file, by one of the ranks."""

    def load(self, file: File, layout: FileLayout, block: int) -> Block:
        """Read a block. The result is kept while its rows are needed."""
        return self.load_rows(file, layout, layout.rows_of(block))

    def load_rows(self, file: File, layout: FileLayout, rows: np.ndarray) -> Block:
        """Read distinct, ascending rows of a file without the others, if ``reads_rows``; return a block of them."""
        raise NotImplementedError

    def take(self, parts: Sequence[BlockRows], rows: int) -> Nest:
        """Return a batch of ``rows`` rows: a structure of arrays."""
        return taken(parts, rows)

    def folder_columns(self, names: Sequence[str]) -> PathColumns | None:
        """Return the columns in the folders of files with these names, for formats that have such columns."""
        return None


def taken(parts: Sequence[BlockRows], rows: int) -> Nest:
    """Return a batch of ``rows`` rows: an array, a ``tf.RaggedTensor``, or a dict of these if blocks are columns."""
    first = parts[0].block
    if isinstance(first, dict):
        return {
            name: taken([BlockRows(block[name], each, places) for block, each, places in parts], rows) for name in first
        }
    if isinstance(first, Ragged):
        return _taken_ragged(parts, rows)
    batch = aligned_empty((rows, *first.shape[1:]), first.dtype)
    for block, each, places in parts:
        batch[places] = block[each]
    return batch


def _taken_ragged(parts: Sequence[BlockRows], rows: int) -> tf.RaggedTensor:
    import tensorflow as tf

    numbers = np.arange(max(rows, *(len(part.block.splits) for part in parts)))
    arrays = [(block, numbers[each], numbers[places]) for block, each, places in parts]
    lengths = np.empty(rows, np.int64)
    for (_, splits), each, places in arrays:
        lengths[places] = splits[each + 1] - splits[each]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    first = parts[0].block.values
    values = aligned_empty((int(ends[-1]) if rows else 0, *first.shape[1:]), first.dtype)
    for block, each, places in arrays:
        size = lengths[places]
        within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        values[np.repeat(starts[places], size) + within] = block.values[np.repeat(block.splits[each], size) + within]
    splits = aligned_empty([rows + 1], np.int64)
    splits[0] = 0
    splits[1:] = ends
    return tf.RaggedTensor.from_row_splits(tensor_of(values), tensor_of(splits), validate=False)
