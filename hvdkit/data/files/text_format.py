"""Lines of text: Criteo's click logs and other delimited files."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv

from hvdkit.cluster.logs import warn_once
from hvdkit.data.aligned import Nest
from hvdkit.data.files.columns import to_numpy
from hvdkit.data.files.formats import BlockRows, FileLayout, OnError
from hvdkit.data.files.listing import File
from hvdkit.data.files.records import RecordFormat, read_pieces
from hvdkit.data.files.storage import OpenFile, opened
from hvdkit.errors import DataError, describe

_CHUNK = 2**24
_MARK = b"\xef\xbb\xbf"
_MARKS = re.compile(rb"^(?:%b)+" % _MARK, re.MULTILINE)
"""Byte-order marks at the starts of lines."""
_UTF_16 = b"\xff\xfe", b"\xfe\xff"


_WITHOUT_QUOTES = "write the file again without quotes, or as Parquet"


def _about_quotes(line: bytes) -> str:
    """Return the end of an error message about a line that may have quoted values."""
    return f"; values in double quotes are not supported: {_WITHOUT_QUOTES}" if b'"' in line else ""


class LineFormat(RecordFormat):
    """Lines of text, each of which is an example; ``expects_newline``: a last line without a line end is an error."""

    name = kind = "lines"

    def __init__(self, header_lines: int = 0, on_error: OnError = "raise", *, expects_newline: bool = False):
        super().__init__(on_error)
        self._header_lines = header_lines
        self._expects_newline = expects_newline
        self.damage_key += f", {header_lines} of them headers"

    def find_offsets(self, file: OpenFile) -> np.ndarray:
        """Return the offset of each line, and the end of the file."""
        file.refuse_compressed()
        size = file.file.size
        if file.read(0, min(size, 2)) in _UTF_16:
            raise DataError(f"{file.file.url} is UTF-16; convert it with `iconv -f UTF-16 -t UTF-8`")
        found = [np.zeros(1, np.uint64)]
        data = b"\n"
        for start in range(0, size, _CHUNK):
            data = file.read(start, min(_CHUNK, size - start))
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
            found.append(ends.astype(np.uint64) + np.uint64(start + 1))
        if not data.endswith(b"\n"):
            found.append(np.array([size], np.uint64))
        return np.concatenate(found)

    def scan(self, file: File) -> FileLayout:
        layout = super().scan(file)
        if file.size == 0:
            return layout
        with opened(file) as source:
            is_open = source.read(file.size - 1, 1) != b"\n"
        if is_open and self._expects_newline:
            raise DataError(f"{file.url} ends without a line end: its last line may be cut; write the file again")
        return layout._replace(is_open=is_open)

    def _offsets_of(self, file: File) -> np.ndarray:
        offsets = super()._offsets_of(file)
        return offsets[min(self._header_lines, len(offsets) - 1) :]

    def contents(self, pieces: Sequence[bytes], file: File, numbers: np.ndarray) -> list[bytes]:
        """Return lines with their ends, without byte-order marks at their starts."""
        return [_MARKS.sub(b"", piece).removesuffix(b"\n").removesuffix(b"\r") + b"\n" for piece in pieces]


class DelimitedFormat(LineFormat):
    """Lines with equal numbers of values between delimiters; the arguments are those of ``hk.data.delimited``."""

    name = "delimited"

    def __init__(
        self,
        columns: Mapping[str, npt.DTypeLike],
        delimiter: str,
        header_lines: int,
        fill: Mapping[str, object],
        on_error: OnError,
        *,
        expects_newline: bool = False,
    ) -> None:
        super().__init__(header_lines, on_error, expects_newline=expects_newline)
        self._types = {name: _arrow_type(name, dtype) for name, dtype in columns.items()}
        self._delimiter = delimiter
        self._fill = dict(fill)
        self._parse_options = csv.ParseOptions(delimiter=delimiter, quote_char=False, ignore_empty_lines=False)
        self._convert_options = csv.ConvertOptions(column_types=self._types, strings_can_be_null=False)
        self.damage_key += f", of {len(columns)} values between {delimiter!r}"

    def contents(self, pieces: Sequence[bytes], file: File, numbers: np.ndarray) -> list[bytes]:
        """Return lines with their ends, after counting their values."""
        lines = super().contents(pieces, file, numbers)
        for number, line in zip(numbers.tolist(), lines, strict=True):
            where = f"line {number + 1 + self._header_lines} of {file.url}"
            if b"\r" in line:
                raise DataError(f"{where} has a carriage return within it; end lines with \\n or \\r\\n")
            if (values := line.count(self._delimiter.encode()) + 1) != len(self._types):
                expected = f"values separated by {self._delimiter!r}, expected {len(self._types)}"
                raise DataError(f"{where} has {values} {expected}{_about_quotes(line)}")
        return lines

    def block(self, source: OpenFile, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return columns."""
        offsets = self._offsets_of(source.file)
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1  # lines that follow each other are one piece
        first = numbers[[0, *breaks]]
        last = numbers[[*(breaks - 1), -1]]
        text = b"".join(read_pieces(source, offsets[first].astype(np.int64), offsets[last + 1].astype(np.int64)))
        # Arrow drops a mark only from the start of the text, which depends on the rows that are read.
        has_marks = _MARK in text
        if has_marks:
            text = _MARKS.sub(b"", text)
        # Arrow takes an empty line, of at most 2 bytes with its end, for one whose values are all missing, and a
        # carriage return for the end of a line.
        has_empty = has_marks or (offsets[numbers + 1] - offsets[numbers] <= 2).any()
        if has_empty or (b"\r" in text and text.count(b"\r") != text.count(b"\r\n")):
            self._records(source, numbers)  # raises if a line has another number of values, or a carriage return
        try:
            columns = self._parsed(text)
        except (pa.ArrowInvalid, TypeError) as error:
            self._raise_for_line(source, numbers, error)
            where = f"lines {numbers[0] + 1 + self._header_lines} to {numbers[-1] + 1 + self._header_lines}"
            raise DataError(f"{where} of {source.file.url} cannot be parsed: {error}") from error
        self._require_no_wrapped(source, numbers, text, columns)
        if b'"' in text:
            self._warn_of_quotes(columns)
        return columns

    def _warn_of_quotes(self, columns: Mapping[str, np.ndarray]) -> None:
        """Warn once of text in double quotes, which other readers remove; a line end between them ends the line."""
        for name, kind in self._types.items():
            if pa.types.is_binary(kind) and any(value.startswith(b'"') for value in columns.get(name, ())):
                warn_once(
                    f"delimited text: values of column {name!r} begin with a double quote, which is part of the value: "
                    "quotes are not removed, and delimiters and line ends between them separate values and lines; "
                    f"{_WITHOUT_QUOTES} if they are not part of the text"
                )

    def _require_no_wrapped(
        self, source: OpenFile, numbers: np.ndarray, text: bytes, columns: Mapping[str, np.ndarray]
    ) -> None:
        """Raise DataError for hexadecimal digits beyond a signed type, which Arrow reads as a negative number."""
        signed = [name for name, kind in self._types.items() if pa.types.is_signed_integer(kind) and name in columns]
        if b"0x" not in text.lower() or not any((columns[name] < 0).any() for name in signed):
            return
        places = {name: number for number, name in enumerate(self._types)}
        for number, line in zip(numbers.tolist(), self._records(source, numbers), strict=True):
            values = line.split(self._delimiter.encode())
            for name in signed:
                value = values[places[name]].strip().lower()
                if value.startswith(b"0x") and int(value, 16) > np.iinfo(columns[name].dtype).max:
                    where = f"line {number + 1 + self._header_lines} of {source.file.url}"
                    remedy = "declare the column as unsigned, or as bytes"
                    raise DataError(
                        describe(f"{where}, column {name!r}", value.decode(), f"{self._types[name]}", remedy)
                    )

    def _parsed(self, text: bytes) -> dict[str, np.ndarray]:
        table = csv.read_csv(  # open_csv starts faster, but parses in Arrow's own threads
            pa.BufferReader(text),
            csv.ReadOptions(use_threads=False, column_names=[*self._types], block_size=len(text) + 1),
            self._parse_options,
            self._convert_options,
        )
        return self.arrays(table)

    def _raise_for_line(self, source: OpenFile, numbers: np.ndarray, error: Exception) -> None:
        """Raise DataError for the first line that cannot be parsed alone."""
        for number, line in zip(numbers.tolist(), self._records(source, numbers), strict=True):
            try:
                self._parsed(line)
            except (pa.ArrowInvalid, TypeError) as cause:
                where = f"line {number + 1 + self._header_lines} of {source.file.url}"
                raise DataError(f"{where} cannot be parsed: {cause}{_about_quotes(line)}") from error

    def arrays(self, table: pa.Table) -> dict[str, np.ndarray]:
        """Return the arrays of a block."""
        return {name: self.array(table, name) for name in self._types}

    def array(self, table: pa.Table, name: str) -> np.ndarray:
        """Return the array of a column."""
        try:
            return np.asarray(to_numpy(table.column(name), self._fill.get(name)))
        except TypeError as error:
            remedy = f"pass fill={{{name!r}: value}}, or a float dtype"
            raise TypeError(describe(f"column {name!r}", str(error), "a value in each line", remedy)) from None


CRITEO_COUNTS = 13
CRITEO_CATEGORIES = 26
_MOST_DIGITS = 8
_NO_DIGIT = 255
_HEX = frozenset(string.hexdigits.encode())
_DIGITS = bytes(int(chr(byte), 16) if byte in _HEX else _NO_DIGIT for byte in range(256))
"""Maps characters to digits."""


class CriteoFormat(DelimitedFormat):
    """Criteo's click logs: a label, 13 counts and 26 categories as hexadecimal digits per line; any may be missing."""

    name = "criteo"

    def __init__(self, on_error: OnError, *, expects_newline: bool = False) -> None:
        counts = [f"count_{i}" for i in range(CRITEO_COUNTS)]
        self._counts = counts
        self._categories = [f"category_{i}" for i in range(CRITEO_CATEGORIES)]
        columns = {"label": "int32", **dict.fromkeys(counts, "float32"), **dict.fromkeys(self._categories, "S8")}
        super().__init__(
            columns, "\t", 0, {"label": 0, **dict.fromkeys(counts, 0)}, on_error, expects_newline=expects_newline
        )

    def arrays(self, table: pa.Table) -> dict[str, np.ndarray]:
        """Return the arrays of a block."""
        counts = [self.array(table, name) for name in self._counts]
        texts = pa.concat_arrays([chunk for name in self._categories for chunk in table.column(name).chunks])
        return {
            "counts": np.stack(counts, axis=1),
            "categories": np.ascontiguousarray(_from_hex(texts).reshape(CRITEO_CATEGORIES, -1).T),
            "label": self.array(table, "label"),
        }

    def take(self, parts: Sequence[BlockRows], rows: int) -> Nest:
        columns = super().take(parts, rows)
        label = columns.pop("label")
        return columns, label


def _from_hex(texts: pa.BinaryArray) -> np.ndarray:
    """Return the values of up to 8 hexadecimal digits each, int64; -1 for an empty text; TypeError for other texts."""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    lengths = np.diff(ends)
    letters = memoryview(data or b"")[ends[0] : ends[-1]]
    digits = np.frombuffer(bytes(letters).translate(_DIGITS), np.uint8)
    if (digits == _NO_DIGIT).any() or (lengths > _MOST_DIGITS).any():
        wrong = next(text for text in texts.to_pylist() if len(text) > _MOST_DIGITS or not set(text) <= _HEX)
        raise TypeError(describe("a category", repr(wrong), "up to 8 hexadecimal digits", "use hk.data.delimited"))
    values = np.full(len(texts), -1, np.int64)
    for length in np.flatnonzero(np.bincount(lengths)).tolist():
        if length == 0:
            continue
        rows = np.flatnonzero(lengths == length)
        if len(rows) * length == len(digits):  # usually all have eight digits, or none
            each = digits.reshape(-1, length)
        else:
            each = digits[(ends[rows] - ends[0])[:, None] + np.arange(length)]
        padded = np.zeros((len(rows), _MOST_DIGITS), np.uint8)
        padded[:, _MOST_DIGITS - length :] = each
        values[rows] = (padded[:, ::2] << 4 | padded[:, 1::2]).view(">u4").ravel()
    return values


def _arrow_type(name: str, dtype: npt.DTypeLike) -> pa.DataType:
    kind = np.dtype(dtype)
    if kind.kind in "SOU":
        return pa.binary()
    if kind.kind not in "iufb" or (kind.kind == "f" and kind.itemsize not in (4, 8)):
        raise TypeError(
            describe(f"columns[{name!r}]", kind.name, "integers, float32, float64, bool or bytes", "choose one")
        )
    return pa.from_numpy_dtype(kind)
