"""Data in files: each rank reads only the rows that it needs, in the global order.

A user's paths become :class:`~hvdkit.data.files.listing.File` objects, whose rows are found by all ranks together and
cached. ``source.py`` turns positions of the order into blocks and rows of files; a format, such as
``parquet_format.py``, reads these. Start reading with ``source.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from hvdkit.data.files.formats import OnError
from hvdkit.data.files.listing import Paths
from hvdkit.data.files.records import Parse
from hvdkit.data.files.source import FileSource
from hvdkit.errors import describe, integer

_EXTRA = {"array_record", "fsspec", "google_crc32c", "pyarrow", "tenacity"}


@contextlib.contextmanager
def _needs_extra() -> Iterator[None]:
    """Say how to install the packages that the files need."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        remedy = "run `pip install 'hvdkit[files]'`"
        raise ImportError(describe("package", f"no {error.name}", "it installed, to read files", remedy)) from error


def _require_columns(name: str, value: Mapping[str, Any] | None, columns: Iterable[str] | None) -> None:
    if columns is not None and (unknown := set(value or ()) - set(columns)):
        raise ValueError(describe(name, sorted(unknown), f"some of {[*columns]}", "correct the names"))


def parquet(
    paths: Paths,
    columns: Sequence[str] | None = None,
    *,
    fill: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
) -> FileSource:
    """Return the rows of Parquet files, for :class:`hvdkit.data.GlobalBatches`.

    A batch is a dict of the columns: arrays ``[rows]``, or ``[rows, k]`` for lists of fixed size k; a
    ``tf.RaggedTensor`` for other lists; arrays of bytes for strings. Times become integers in the column's unit,
    missing floats become NaN.

    Every rank must call this, with the same files; each reads the footers of a part of them.

    Args:
        paths: A file, a folder, a pattern or a URL that fsspec knows, or a sequence of these.
        columns: The columns to read; default: all.
        fill: For columns with missing values: what replaces them.
        on_error: "skip" leaves out files that cannot be opened, logs them, and counts them in ``source.skipped``. A
            damaged row group is an error even so.

    Raises:
        ValueError: No file was found, files have unlike columns, or a column does not exist.
        DataError: A file is damaged.
        CollectiveMismatchError: Ranks see different files, or pass other arguments.

    Example:
        >>> rows = hk.data.parquet("clicks/day_*.parquet", ["user", "items", "label"])  # doctest: +SKIP
        >>> batches = hk.data.GlobalBatches(rows, 65536, shuffle_seed=0, shuffle="blocks")  # doctest: +SKIP
    """
    if isinstance(columns, str) or (columns is not None and not columns):
        raise TypeError(describe("columns", columns, "a sequence of names, or None for all", "pass e.g. ['x', 'y']"))
    _require_columns("fill", fill, columns)
    with _needs_extra():
        from hvdkit.data.files.parquet_format import ParquetFormat

        return FileSource(paths, ParquetFormat(columns, fill or {}), on_error, {"columns": columns, "fill": fill})


def tfrecord(paths: Paths, parse: Parse = None, *, on_error: OnError = "raise") -> FileSource:
    """Return the records of TFRecord files, for :class:`hvdkit.data.GlobalBatches`.

    The offset of each record is found once and cached, next to the data if the folder can be written. Every rank must
    call this, with the same files; each scans a part of them.

    Args:
        paths: A file, a folder, a pattern or a URL that fsspec knows, or a sequence of these.
        parse: A dict of ``tf.io`` features, to parse ``tf.train.Example``; or a TensorFlow function of one record, a
            scalar string tensor, as for ``tf.data.Dataset.map``. The dict is faster. Default: a batch is an array of
            bytes ``[rows]``.
        on_error: "skip" leaves out damaged records, and files that cannot be read, logs them, and counts them in
            ``source.skipped``. All records are read once to find them.

    Raises:
        ValueError: No file was found.
        DataError: A file is damaged or compressed.
        CollectiveMismatchError: Ranks see different files, or pass other arguments.

    Example:
        >>> features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
        ... # doctest: +SKIP
        >>> records = hk.data.tfrecord("images/train-*", features)  # doctest: +SKIP
    """
    with _needs_extra():
        from hvdkit.data.files.tfrecord_format import TFRecordFormat

        return FileSource(paths, TFRecordFormat(parse, on_error), on_error, {"parse": parse})


def array_record(paths: Paths, parse: Parse = None, *, on_error: OnError = "raise") -> FileSource:
    """Return the records of ArrayRecord files, for :class:`hvdkit.data.GlobalBatches`.

    Args and Raises as for :func:`tfrecord`. Files written with ``group_size:1`` are read fastest in a full shuffle.
    """
    with _needs_extra():
        from hvdkit.data.files.array_record_format import ArrayRecordFormat

        return FileSource(paths, ArrayRecordFormat(parse), on_error, {"parse": parse})


def criteo(paths: Paths, *, on_error: OnError = "raise") -> FileSource:
    """Return the examples of Criteo's click logs, for :class:`hvdkit.data.GlobalBatches`.

    Each line has a label, 13 counts and 26 categories in hexadecimal digits, separated by tabs. A batch is
    ``({"counts": float32 [rows, 13], "categories": int64 [rows, 26]}, label int32 [rows])``. A missing count or label
    is 0, a missing category -1.

    Args and Raises as for :func:`delimited`.
    """
    with _needs_extra():
        from hvdkit.data.files.text_format import CriteoFormat

        return FileSource(paths, CriteoFormat(on_error), on_error)


def delimited(
    paths: Paths,
    columns: Mapping[str, npt.DTypeLike],
    *,
    delimiter: str = ",",
    header_lines: int = 0,
    fill: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
) -> FileSource:
    """Return the lines of text files, for :class:`hvdkit.data.GlobalBatches`.

    A batch is a dict of the columns, arrays ``[rows]``. Each line is an example; values are not quoted. The offsets of
    the lines are cached as those of :func:`tfrecord`.

    Args:
        paths: A file, a folder, a pattern or a URL that fsspec knows, or a sequence of these.
        columns: The name and dtype of each value of a line: numbers, booleans, or "S" for bytes.
        delimiter: The character between values.
        header_lines: Number of lines at the start of each file to skip.
        fill: For columns with missing values: what replaces them. Missing floats are NaN by default.
        on_error: As for :func:`tfrecord`; a line with another number of values is damaged.

    Raises:
        TypeError: A dtype is not supported.
        ValueError: No file was found.
        DataError: A file is compressed, or a line does not have these columns.
        CollectiveMismatchError: Ranks see different files, or pass other arguments.

    Example:
        >>> columns = {"user": "int64", "movie": "int64", "rating": "float32", "time": "int64"}
        >>> ratings = hk.data.delimited("ratings.csv", columns, header_lines=1)  # doctest: +SKIP
    """
    if not isinstance(columns, Mapping) or not columns:
        remedy = "pass e.g. {'user': 'int64', 'rating': 'float32'}"
        raise TypeError(describe("columns", columns, "a dict of names and dtypes", remedy))
    if not isinstance(delimiter, str) or len(delimiter.encode()) != 1 or delimiter in "\r\n":
        raise ValueError(describe("delimiter", delimiter, "one ASCII character", r"pass e.g. ',' or '\t'"))
    header_lines = integer("header_lines", header_lines, minimum=0)
    _require_columns("fill", fill, columns)
    with _needs_extra():
        from hvdkit.data.files.text_format import DelimitedFormat

        options = {"columns": columns, "delimiter": delimiter, "header_lines": header_lines, "fill": fill}
        lines = DelimitedFormat(columns, delimiter, header_lines, fill or {}, on_error)
        return FileSource(paths, lines, on_error, options)


def npy(paths: Paths, *, on_error: OnError = "raise") -> FileSource:
    """Return the rows of .npy files ``[n, ...]`` of one dtype and shape, for :class:`hvdkit.data.GlobalBatches`.

    Args and Raises as for :func:`parquet`. A batch is an array ``[rows, ...]``.
    """
    with _needs_extra():
        from hvdkit.data.files.npy_format import NpyFormat

        return FileSource(paths, NpyFormat(), on_error)
