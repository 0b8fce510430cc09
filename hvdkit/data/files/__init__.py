"""Data in files: each rank reads only the rows that it needs, in the global order.

A user's paths become :class:`~hvdkit.data.files.listing.File` objects, whose rows are found by all ranks together and
cached. ``source.py`` turns positions of the order into blocks and rows of files; a format, such as
``parquet_format.py``, reads these. Start reading with ``source.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy.typing as npt

from hvdkit.data.files.formats import OnError
from hvdkit.data.files.listing import Paths
from hvdkit.data.files.records import Parse
from hvdkit.data.files.source import FileSource
from hvdkit.errors import describe, integer

_EXTRA = {"array_record", "fsspec", "google_crc32c", "pyarrow", "tenacity"}


@contextlib.contextmanager
def needs_extra() -> Iterator[None]:
    """Say how to install the packages that the files need."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        remedy = "run `pip install 'hvdkit[files]'`"
        raise ImportError(describe("package", f"no {error.name}", "it installed, to read files", remedy)) from error


def _require_columns(fill: Mapping[str, object] | None, columns: Iterable[str] | None) -> None:
    if columns is not None and (unknown := set(fill or ()) - set(columns)):
        raise ValueError(describe("fill", sorted(unknown), f"some of {[*columns]}", "correct the names"))


def parquet(
    paths: Paths,
    columns: Sequence[str] | None = None,
    *,
    fill: Mapping[str, object] | None = None,
    on_error: OnError = "raise",
) -> FileSource:
    """Return the rows of Parquet files, for ``hk.data.GlobalBatches``.

    A batch is a dict of the columns: arrays ``[rows]``, or ``[rows, k]`` for lists of fixed size k; a
    ``tf.RaggedTensor`` for other lists; arrays of bytes for strings. Times become integers in the column's unit
    (microseconds if they are stored as INT96), missing floats become NaN. Columns in the
    names of folders below the paths (``year=2024/``) are int32, or text.

    Every rank must call this, with the same files; each reads the footers of a part of them.

    Args:
        paths: A file, a folder, a pattern or a URL that fsspec knows, or a sequence of these.
        columns: The columns to read; default: all.
        fill: For columns with missing values: what replaces them.
        on_error: "skip" leaves out files that cannot be opened, logs them, and counts them in ``source.skipped``. A
            damaged row group is an error even so.

    Returns:
        A source of rows, whose number is its ``examples``.

    Raises:
        TypeError: ``columns`` is a single string.
        ValueError: No file was found, files have unlike columns, or a column does not exist.
        DataError: A file is damaged, or a column encrypted.
        CollectiveMismatchError: Ranks see different files, or pass other arguments.

    Examples:
        >>> import pathlib, tempfile
        >>> import pyarrow as pa
        >>> import pyarrow.parquet as pq
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> folder = pathlib.Path(hk.broadcast_object(tempfile.mkdtemp()))  # one folder for all ranks
        >>> if hk.is_chief():
        ...     table = pa.table({"user": [7, 8, 9], "items": [[1], [2, 3], []], "label": [0.0, 1.0, None]})
        ...     pq.write_table(table, folder / "day_1.parquet")
        >>> hk.barrier()
        >>> rows = hk.data.parquet(folder / "day_*.parquet", ["user", "label"], fill={"label": -1.0})
        >>> batches = hk.data.GlobalBatches(rows, 3, rank=0, size=1)  # to train: shuffle_seed=0, shuffle="blocks"
        >>> batch = next(batches)
        >>> batch["user"].tolist(), batch["label"].tolist()
        ([7, 8, 9], [0.0, 1.0, -1.0])
    """
    if isinstance(columns, str) or (columns is not None and not columns):
        raise TypeError(describe("columns", columns, "a sequence of names, or None for all", "pass e.g. ['x', 'y']"))
    _require_columns(fill, columns)
    with needs_extra():
        from hvdkit.data.files.parquet_format import ParquetFormat

        return FileSource(paths, ParquetFormat(columns, fill or {}), on_error, {"columns": columns, "fill": fill})


def tfrecord(paths: Paths, parse: Parse = None, *, on_error: OnError = "raise") -> FileSource:
    """Return the records of TFRecord files, for ``hk.data.GlobalBatches``.

    The offset of each record is found once and cached, next to the data if the folder can be written. Every rank must
    call this, with the same files; each scans a part of them.

    Args:
        paths: A file, a folder, a pattern or a URL that fsspec knows, or a sequence of these.
        parse: A dict of ``tf.io`` features, to parse ``tf.train.Example``; or a TensorFlow function of one record, a
            scalar string tensor, as for ``tf.data.Dataset.map``. The dict is faster. Default: a batch is an array of
            bytes ``[rows]``.
        on_error: "skip" leaves out damaged records, and files that cannot be read, logs them, and counts them in
            ``source.skipped``. All records are read once to find them.

    Returns:
        A source of records, whose number is its ``examples``.

    Raises:
        ValueError: No file was found.
        DataError: A file is damaged or compressed.
        CollectiveMismatchError: Ranks see different files, or pass other arguments.

    Examples:
        >>> import pathlib, tempfile
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> folder = pathlib.Path(hk.broadcast_object(tempfile.mkdtemp()))  # one folder for all ranks
        >>> if hk.is_chief():
        ...     with tf.io.TFRecordWriter(str(folder / "train-0")) as file:
        ...         for label in range(4):
        ...             feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
        ...             example = tf.train.Example(features=tf.train.Features(feature={"label": feature}))
        ...             file.write(example.SerializeToString())
        >>> hk.barrier()
        >>> records = hk.data.tfrecord(folder / "train-*", {"label": tf.io.FixedLenFeature([], tf.int64)})
        >>> batches = hk.data.GlobalBatches(records, 4, rank=0, size=1)
        >>> next(batches)["label"].tolist()
        [0, 1, 2, 3]
    """
    with needs_extra():
        from hvdkit.data.files.tfrecord_format import TFRecordFormat

        return FileSource(paths, TFRecordFormat(parse, on_error), on_error, {"parse": parse})


def array_record(paths: Paths, parse: Parse = None, *, on_error: OnError = "raise") -> FileSource:
    """Return the records of ArrayRecord files, for ``hk.data.GlobalBatches``.

    Files written with ``group_size:1`` are read fastest in a full shuffle. Every rank must call this, with the same
    files.

    Args:
        paths: A file, a folder, a pattern or a URL that fsspec knows, or a sequence of these.
        parse: As for ``hk.data.tfrecord``.
        on_error: As for ``hk.data.tfrecord``.

    Returns:
        A source of records, whose number is its ``examples``.

    Raises:
        ValueError, DataError, CollectiveMismatchError: As for ``hk.data.tfrecord``.

    Examples:
        >>> import pathlib, tempfile
        >>> from array_record.python.array_record_module import ArrayRecordWriter
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> folder = pathlib.Path(hk.broadcast_object(tempfile.mkdtemp()))  # one folder for all ranks
        >>> if hk.is_chief():
        ...     writer = ArrayRecordWriter(str(folder / "train-0"), "group_size:1")
        ...     for record in (b"first", b"second"):
        ...         writer.write(record)
        ...     writer.close()
        >>> hk.barrier()
        >>> records = hk.data.array_record(folder)
        >>> next(hk.data.GlobalBatches(records, 2, rank=0, size=1)).tolist()
        [b'first', b'second']
    """
    with needs_extra():
        from hvdkit.data.files.array_record_format import ArrayRecordFormat

        return FileSource(paths, ArrayRecordFormat(parse), on_error, {"parse": parse})


def criteo(paths: Paths, *, expect_final_newline: bool = False, on_error: OnError = "raise") -> FileSource:
    """Return the examples of Criteo's click logs, for ``hk.data.GlobalBatches``.

    Each line has a label, 13 counts and 26 categories in hexadecimal digits, separated by tabs. A batch is
    ``({"counts": float32 [rows, 13], "categories": int64 [rows, 26]}, label int32 [rows])``. A missing count or label
    is 0, a missing category -1.

    Args:
        paths: A file, a folder, a pattern or a URL that fsspec knows, or a sequence of these.
        expect_final_newline: As for ``hk.data.delimited``.
        on_error: As for ``hk.data.delimited``.

    Returns:
        A source of lines, whose number is its ``examples``.

    Raises:
        ValueError, DataError, CollectiveMismatchError: As for ``hk.data.delimited``.

    Examples:
        >>> import pathlib, tempfile
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> folder = pathlib.Path(hk.broadcast_object(tempfile.mkdtemp()))  # one folder for all ranks
        >>> if hk.is_chief():
        ...     line = ["1", *map(str, range(13)), *["68fd1e64"] * 26]
        ...     _ = (folder / "train.txt").write_text("\\t".join(line) + "\\n")
        >>> hk.barrier()
        >>> clicks = hk.data.criteo(folder / "train.txt")
        >>> features, label = next(hk.data.GlobalBatches(clicks, 1, rank=0, size=1))
        >>> features["counts"].shape, features["categories"][0, 0].item() == 0x68FD1E64, label.tolist()
        ((1, 13), True, [1])
    """
    with needs_extra():
        from hvdkit.data.files.text_format import CriteoFormat

        lines = CriteoFormat(on_error, expects_newline=expect_final_newline)
        return FileSource(paths, lines, on_error, {"expect_final_newline": expect_final_newline})


def delimited(
    paths: Paths,
    columns: Mapping[str, npt.DTypeLike],
    *,
    delimiter: str = ",",
    header_lines: int = 0,
    fill: Mapping[str, object] | None = None,
    expect_final_newline: bool = False,
    on_error: OnError = "raise",
) -> FileSource:
    """Return the lines of text files, for ``hk.data.GlobalBatches``.

    A batch is a dict of the columns, arrays ``[rows]``. Each line is an example; values are not quoted. A UTF-8
    byte-order mark at the start of a line is left out. The offsets of the lines are cached as those of
    ``hk.data.tfrecord``.

    Args:
        paths: A file, a folder, a pattern or a URL that fsspec knows, or a sequence of these.
        columns: The name and dtype of each value of a line: numbers, booleans, or "S" for bytes.
        delimiter: The character between values.
        header_lines: Number of lines at the start of each file to skip.
        fill: For columns with missing values: what replaces them. Missing floats are NaN by default.
        expect_final_newline: A file whose last line has no line end, because it was cut, is an error. Otherwise, the
            chief warns of such files.
        on_error: As for ``hk.data.tfrecord``; a line with another number of values is damaged.

    Returns:
        A source of lines, whose number is its ``examples``.

    Raises:
        TypeError: A dtype is not supported.
        ValueError: No file was found.
        DataError: A file is compressed, or a line does not have these columns.
        CollectiveMismatchError: Ranks see different files, or pass other arguments.

    Examples:
        >>> import pathlib, tempfile
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> folder = pathlib.Path(hk.broadcast_object(tempfile.mkdtemp()))  # one folder for all ranks
        >>> if hk.is_chief():
        ...     _ = (folder / "ratings.csv").write_text("user,movie,rating\\n1,31,2.5\\n7,1029,3.0\\n")
        >>> hk.barrier()
        >>> columns = {"user": "int64", "movie": "int64", "rating": "float32"}
        >>> ratings = hk.data.delimited(folder / "ratings.csv", columns, header_lines=1)
        >>> next(hk.data.GlobalBatches(ratings, 2, rank=0, size=1))["rating"].tolist()
        [2.5, 3.0]
    """
    if not isinstance(columns, Mapping) or not columns:
        remedy = "pass e.g. {'user': 'int64', 'rating': 'float32'}"
        raise TypeError(describe("columns", columns, "a dict of names and dtypes", remedy))
    if not isinstance(delimiter, str) or len(delimiter.encode()) != 1 or delimiter in "\r\n":
        raise ValueError(describe("delimiter", delimiter, "one ASCII character", r"pass e.g. ',' or '\t'"))
    header_lines = integer("header_lines", header_lines, minimum=0)
    _require_columns(fill, columns)
    with needs_extra():
        from hvdkit.data.files.text_format import DelimitedFormat

        options = {
            "columns": columns,
            "delimiter": delimiter,
            "header_lines": header_lines,
            "fill": fill,
            "expect_final_newline": expect_final_newline,
        }
        lines = DelimitedFormat(
            columns, delimiter, header_lines, fill or {}, on_error, expects_newline=expect_final_newline
        )
        return FileSource(paths, lines, on_error, options)


def npy(paths: Paths, *, on_error: OnError = "raise") -> FileSource:
    """Return the rows of .npy files ``[n, ...]`` of one dtype and shape, for ``hk.data.GlobalBatches``.

    A batch is an array ``[rows, ...]``. Every rank must call this, with the same files.

    Args:
        paths: A file, a folder, a pattern or a URL that fsspec knows, or a sequence of these.
        on_error: As for ``hk.data.parquet``.

    Returns:
        A source of rows, whose number is its ``examples``.

    Raises:
        ValueError, DataError, CollectiveMismatchError: As for ``hk.data.parquet``.

    Examples:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> folder = pathlib.Path(hk.broadcast_object(tempfile.mkdtemp()))  # one folder for all ranks
        >>> if hk.is_chief():
        ...     for part in range(2):
        ...         np.save(folder / f"part-{part}.npy", np.full((3, 8), part, "float32"))
        >>> hk.barrier()
        >>> rows = hk.data.npy(folder)
        >>> batch = next(hk.data.GlobalBatches(rows, 6, rank=0, size=1))
        >>> batch.shape, batch[:, 0].tolist()
        ((6, 8), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    """
    with needs_extra():
        from hvdkit.data.files.npy_format import NpyFormat

        return FileSource(paths, NpyFormat(), on_error)
