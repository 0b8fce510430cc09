"""TFRecord files.

Each record is: its length, uint64; the masked CRC-32C of these 8 bytes; the data; the masked CRC-32C of the data.
Source: tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Sequence
from typing import TypeVar

import google_crc32c
import numpy as np

from hvdkit.data.aligned import Nest
from hvdkit.data.files.formats import BlockRows, OnError, taken
from hvdkit.data.files.listing import File
from hvdkit.data.files.records import Parse, Parser, RecordFormat
from hvdkit.data.files.storage import OpenFile
from hvdkit.errors import DataError

# bytes
_HEADER = 12
_FOOTER = 4
_ZLIB_BYTES = 4096  # of the start of a file, which are decompressed to recognize zlib
T = TypeVar("T", int, np.ndarray)
# Bytes that are read ahead to find the lengths of short records.
_LEAST_AHEAD = 2**12
_MOST_AHEAD = 2**24


class TFRecordFormat(RecordFormat):
    """Records of TFRecord files."""

    name = "tfrecord"
    kind = "TFRecord"

    def __init__(self, parse: Parse, on_error: OnError = "raise"):
        super().__init__(on_error)
        if self.skips:  # the offsets end where a length is damaged
            self.offsets_key += ", without the end"
        self._parser = Parser(parse)

    def find_offsets(self, file: OpenFile) -> np.ndarray:
        """Return the offset of each record, and the end, from the lengths of all records."""
        url = file.file.url
        size = file.file.size
        file.refuse_compressed()
        _refuse_zlib(file)
        offsets = [0]
        position = 0
        chunk = b""
        start = 0
        ahead = _LEAST_AHEAD
        while position < size:
            if position + _HEADER > start + len(chunk):
                is_next = position <= start + len(chunk)  # otherwise records are longer than what is read
                ahead = min(2 * ahead, _MOST_AHEAD) if is_next else _LEAST_AHEAD
                start = position
                chunk = file.read(position, min(ahead, size - position))
            header = chunk[position - start : position - start + _HEADER]
            problem = f"{url} ends within record {len(offsets) - 1}, at byte {size}; it is not complete"
            if len(header) == _HEADER:
                length, crc = struct.unpack("<QI", header)
                position += _HEADER + length + _FOOTER
                if _masked(google_crc32c.value(header[:8])) != crc:
                    problem = f"{url}: record {len(offsets) - 1}, at byte {offsets[-1]}, has a damaged length (CRC)"
                elif position <= size:
                    offsets.append(position)
                    continue
            if not self.skips:
                raise DataError(problem)
            break
        return np.array(offsets, np.uint64)

    def contents(self, pieces: Sequence[bytes], file: File, numbers: np.ndarray) -> list[bytes]:
        """Return the contents of records after checking them."""
        contents = [piece[_HEADER:-_FOOTER] for piece in pieces]
        stored = np.frombuffer(b"".join([piece[-_FOOTER:] for piece in pieces]), "<u4")
        found = np.fromiter(map(google_crc32c.value, contents), np.uint32, len(contents))
        if len(damaged := np.flatnonzero(_masked(found) != stored)):
            number = int(numbers[damaged[0]])
            offset = self._offsets_of(file)[number]
            raise DataError(f"{file.url}: record {number}, at byte {offset}, is damaged (CRC)")
        return contents

    def take(self, parts: Sequence[BlockRows], rows: int) -> Nest:
        return self._parser(taken(parts, rows))


def is_header(data: bytes) -> bool:
    """Return True if ``data`` begins like a TFRecord file."""
    return len(data) >= _HEADER and _masked(google_crc32c.value(data[:8])) == struct.unpack("<I", data[8:_HEADER])[0]


def _refuse_zlib(file: OpenFile) -> None:
    """Raise DataError for a file written with TensorFlow's option "ZLIB", whose start is no unusual one for text."""
    start = file.read(0, min(file.file.size, _ZLIB_BYTES))
    if is_header(start):
        return
    with contextlib.suppress(zlib.error):
        if zlib.decompressobj().decompress(start):
            problem = f"{file.file.url} is compressed with zlib, which has no access to single records"
            raise DataError(f"{problem}; write it without TFRecordOptions(compression_type='ZLIB')")


def _masked(crc: T) -> T:
    """Return CRCs, an int or uint32 array, as the file has them."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
