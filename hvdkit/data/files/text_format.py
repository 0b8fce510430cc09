"""Lines of text: Criteo's click logs and other delimited files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv

from hvdkit.data.files.columns import to_numpy
from hvdkit.data.files.listing import File
from hvdkit.data.files.records import RecordFormat
from hvdkit.data.files.source import OnError
from hvdkit.data.files.storage import OpenFile
from hvdkit.errors import DataError, describe

_CHUNK = 2**24


class LineFormat(RecordFormat):
    """Lines of text, each of which is an example.

    Args:
        header_lines: Number of lines at the start of each file to skip.
    """

    name = "lines"

    def __init__(self, header_lines: int = 0, on_error: OnError = "raise"):
        super().__init__(on_error)
        self._header_lines = header_lines
        self.kind = f"lines after {header_lines}" if header_lines else "lines"

    def find_offsets(self, file: OpenFile) -> np.ndarray:
        """Return the offset of each line, and the end of the file."""
        url, size = file.file.url, file.file.size
        if file.read(0, min(2, size)) == b"\x1f\x8b":
            raise DataError(f"{url} is compressed with gzip, which has no access to single lines; decompress it")
        found, data = [np.zeros(1, np.uint64)], b"\n"
        for start in range(0, size, _CHUNK):
            data = file.read(start, min(_CHUNK, size - start))
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
            found.append(ends.astype(np.uint64) + np.uint64(start + 1))
        if not data.endswith(b"\n"):
            found.append(np.array([size], np.uint64))
        return np.concatenate(found)[self._header_lines :]

    def record(self, data: bytes, file: File, row: int, offset: int) -> bytes:
        """Return a line with its end."""
        return data.rstrip(b"\r\n") + b"\n"

    def batch(self, records: Sequence[bytes]) -> Any:
        """Return an array of bytes."""
        array = np.empty(len(records), object)
        array[:] = records
        return array


class DelimitedFormat(LineFormat):
    """Lines with the same number of values, separated by a delimiter.

    Args:
        columns: The name and dtype of each value.
        delimiter: One character.
        header_lines: Number of lines at the start of each file to skip.
        fill: The value that replaces missing values, for each column that may have some.
    """

    name = "delimited"

    def __init__(
        self,
        columns: Mapping[str, npt.DTypeLike],
        delimiter: str,
        header_lines: int,
        fill: Mapping[str, Any],
        on_error: OnError,
    ) -> None:
        super().__init__(header_lines, on_error)
        self._types = {name: _arrow_type(name, dtype) for name, dtype in columns.items()}
        self._delimiter, self._fill = delimiter, dict(fill)
        if self.skips:  # which lines are damaged depends on the number of values
            self.kind += f" of {len(columns)} values between {delimiter!r}"

    def record(self, data: bytes, file: File, row: int, offset: int) -> bytes:
        """Return a line with its end, after counting its values."""
        line = super().record(data, file, row, offset)
        if (values := line.count(self._delimiter.encode()) + 1) != len(self._types):
            where = f"line {row + 1 + self._header_lines} of {file.url}"
            raise DataError(
                f"{where} has {values} values separated by {self._delimiter!r}, expected {len(self._types)}"
            )
        return line

    def batch(self, records: Sequence[bytes]) -> Any:
        table = csv.read_csv(
            io.BytesIO(b"".join(records)),
            csv.ReadOptions(use_threads=False, column_names=[*self._types]),
            csv.ParseOptions(delimiter=self._delimiter, quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(column_types=self._types, strings_can_be_null=False),
        )
        return {name: to_numpy(table.column(name), self._fill.get(name)) for name in self._types}


CRITEO_COUNTS, CRITEO_CATEGORIES = 13, 26
_NO_DIGIT = 255
_HEX_VALUES = np.full(256, _NO_DIGIT, np.uint8)
for _digits in ("0123456789abcdef", "0123456789ABCDEF"):
    _HEX_VALUES[np.frombuffer(_digits.encode(), np.uint8)] = np.arange(16)


class CriteoFormat(DelimitedFormat):
    """Criteo's click logs: a label, 13 counts and 26 categories as hexadecimal digits per line; any may be missing."""

    name = "criteo"

    def __init__(self, on_error: OnError) -> None:
        counts = [f"count_{i}" for i in range(CRITEO_COUNTS)]
        self._counts, self._categories = counts, [f"category_{i}" for i in range(CRITEO_CATEGORIES)]
        columns = {"label": "int32", **dict.fromkeys(counts, "float32"), **dict.fromkeys(self._categories, "S8")}
        super().__init__(columns, "\t", 0, {"label": 0, **dict.fromkeys(counts, 0)}, on_error)

    def batch(self, records: Sequence[bytes]) -> Any:
        columns = super().batch(records)
        counts = np.stack([columns[name] for name in self._counts], axis=1)
        categories = np.stack([_from_hex(columns[name]) for name in self._categories], axis=1)
        return {"counts": counts, "categories": categories}, columns["label"]


def _from_hex(texts: np.ndarray) -> np.ndarray:
    """Return the values of up to 8 hexadecimal digits each, int64; -1 for an empty text."""
    digits = texts.astype("S8").view(np.uint8).reshape(len(texts), 8)
    lengths = (digits != 0).sum(axis=1)
    values = np.zeros(len(texts), np.int64)
    for i in range(8):
        is_digit = i < lengths
        values = np.where(is_digit, values * 16 + _HEX_VALUES[digits[:, i]], values)
    return np.where(lengths == 0, -1, values)


def _arrow_type(name: str, dtype: npt.DTypeLike) -> pa.DataType:
    kind = np.dtype(dtype)
    if kind.kind in "SOU":
        return pa.binary()
    if kind.kind not in "iufb":
        raise TypeError(describe(f"columns[{name!r}]", kind.name, "numbers, booleans or bytes", "choose another dtype"))
    return pa.from_numpy_dtype(kind)
