"""Data in files: each rank reads only the rows that it needs, in the global order.

A user's paths become :class:`~hvdkit.data.files.listing.File` objects, whose rows are found by all ranks together and
cached. ``source.py`` turns positions of the order into blocks and rows of files; a format (``parquet.py`` and its
siblings) reads these. Start reading with ``source.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.data.files.listing import Paths, list_files
from hvdkit.data.files.source import FileSource


def parquet(paths: Paths, columns: Sequence[str] | None = None, *, fill: Mapping[str, Any] | None = None) -> FileSource:
    """Return the rows of Parquet files, for :class:`hvdkit.data.GlobalBatches`.

    A batch is a dict of the columns: arrays ``[rows]``, or ``[rows, k]`` for lists of fixed size k; a
    ``tf.RaggedTensor`` for other lists; arrays of bytes for strings. Times become integers in the column's unit,
    missing floats become NaN.

    Every rank must call this, with the same files; each reads the footers of a part of them.

    Args:
        paths: A file, a folder, a pattern or a URL that fsspec knows, or a sequence of these.
        columns: The columns to read; default: all.
        fill: For columns with missing values: what replaces them.

    Raises:
        ValueError: There is no file, files have unlike columns, or a column does not exist.
        DataError: A file is damaged.
        CollectiveMismatchError: Ranks see different files.

    Example:
        >>> rows = hk.data.parquet("clicks/day_*.parquet", ["user", "items", "label"])  # doctest: +SKIP
        >>> batches = hk.data.GlobalBatches(rows, 65536, shuffle_seed=0, shuffle="blocks")  # doctest: +SKIP
    """
    from hvdkit.data.files.parquet import ParquetFormat

    return FileSource(list_files(paths, (".parquet", ".pq")), ParquetFormat(columns, fill or {}))
