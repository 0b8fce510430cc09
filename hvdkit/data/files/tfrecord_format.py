"""TFRecord files.

Each record is: its length, uint64; the masked CRC-32C of these 8 bytes; the data; the masked CRC-32C of the data.
Source: tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import google_crc32c
import numpy as np

from hvdkit.cluster.logs import get_logger
from hvdkit.data.files.listing import File
from hvdkit.data.files.records import Parse, Parser, RecordFormat
from hvdkit.data.files.source import OnError
from hvdkit.data.files.storage import OpenFile
from hvdkit.errors import DataError

_HEADER, _FOOTER = 12, 4  # bytes
# Bytes that are read ahead to find the lengths of short records.
_LEAST_AHEAD, _MOST_AHEAD = 2**12, 2**24


class TFRecordFormat(RecordFormat):
    """Records of TFRecord files."""

    name = "tfrecord"
    kind = "TFRecord"

    def __init__(self, parse: Parse, on_error: OnError = "raise"):
        super().__init__(on_error)
        self._parser = Parser(parse)

    def find_offsets(self, file: OpenFile) -> np.ndarray:
        """Return the offset of each record, and the end, from the lengths of all records."""
        url, size = file.file.url, file.file.size
        if file.read(0, min(2, size)) == b"\x1f\x8b":
            raise DataError(f"{url} is compressed with gzip, which has no access to single records; decompress it")
        offsets, position, chunk, start, ahead = [0], 0, b"", 0, _LEAST_AHEAD
        while position < size:
            if position + _HEADER > start + len(chunk):
                is_next = position <= start + len(chunk)  # otherwise records are longer than what is read
                ahead = min(2 * ahead, _MOST_AHEAD) if is_next else _LEAST_AHEAD
                start, chunk = position, file.read(position, min(ahead, size - position))
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
            get_logger().warning("%s; its end is skipped", problem)
            break
        return np.array(offsets, np.uint64)

    def record(self, data: bytes, file: File, row: int, offset: int) -> bytes:
        """Return the content of a record after checking it."""
        content = data[_HEADER:-_FOOTER]
        (crc,) = struct.unpack("<I", data[-_FOOTER:])
        if _masked(google_crc32c.value(content)) != crc:
            raise DataError(f"{file.url}: record {row}, at byte {offset}, is damaged (CRC)")
        return content

    def batch(self, records: Sequence[bytes]) -> Any:
        return self._parser(records)


def is_header(data: bytes) -> bool:
    """Return True if ``data`` begins like a TFRecord file."""
    return len(data) >= _HEADER and _masked(google_crc32c.value(data[:8])) == struct.unpack("<I", data[8:_HEADER])[0]


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
