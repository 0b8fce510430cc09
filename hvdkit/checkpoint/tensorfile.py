"""Safetensors files that are written as a stream and read by rows, with a checksum for every block of rows.

The ``safetensors`` package needs the bytes of all tensors at once to write a file: twice the memory of a large shard.
The format is an 8-byte length, a JSON header and the tensors' bytes, so this module writes it directly; any safetensors
reader can read it. Source: the "Format" section of the safetensors project.

Checksums are XXH3-64 of blocks of about :data:`BLOCK_BYTES`, aligned to whole rows, and are stored in the header's
``__metadata__``; the checksum of the header (XXH3-128) is stored in the manifest. So a few rows can be read and
verified without the rest of the file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import xxhash

from hvdkit.checkpoint.bounds import DIMENSIONS, HEADER_BYTES, TOTAL_BYTES
from hvdkit.checkpoint.entries import Allowed, StateTensor
from hvdkit.checkpoint.files import ReadableFile, RunPath, checkpoint_errors, open_readable
from hvdkit.checkpoint.schema import FieldError, array, checked, choice, integer, json_of, mapping, text, typed
from hvdkit.errors import CheckpointError, CorruptCheckpointError, NonFiniteError, describe

# Also the I/O size: a larger block would be evicted from the core's cache between its checksum and its write.
BLOCK_BYTES = 2**20
_USUAL_HEADER = 2**16  # bytes of a header that are read at once, as a request to a store takes longer than they do

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DIGITS = re.compile("[0-9a-f]*")
_DIGESTS = "xxh3_64 "  # prefix of the metadata key of a tensor's checksums
# Bit patterns of infinity for 16-bit floats; NaNs are larger. NumPy's checks for these dtypes are 20 times slower.
_INFINITY_BITS = {np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}


class NonFiniteTensor(NonFiniteError):
    """A tensor contains a value that is not allowed; the message names the tensor and the value."""


class TensorLocation(NamedTuple):
    """The location of a tensor's rows in a file, and their checksums."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    digests: str

    @property
    def rows(self) -> int:
        """The length of the first axis; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def block_rows(self) -> int:
        """Rows per checksum; the last block may have fewer."""
        return max(1, BLOCK_BYTES // max(1, self.row_bytes))

    @property
    def blocks(self) -> int:
        """The number of checksums."""
        return 0 if self.bytes == 0 else -(-self.rows // self.block_rows)

    def checksum(self) -> str:
        """Return the checksum of the whole tensor, computed over its blocks' checksums."""
        return xxhash.xxh3_128_hexdigest(self.digests.encode())


class FileRecord(NamedTuple):
    """A manifest's record of a file: its length, its header's checksum, and each tensor's checksum."""

    bytes: int
    checksum: str
    tensors: dict[str, str]

    @classmethod
    def of(cls, bytes: int, checksum: str) -> FileRecord:
        """Return the record of a file as the manifest has it, which keeps the tensors' checksums elsewhere."""
        return cls(bytes, checksum, {})


def storable(dtype: np.dtype) -> bool:
    """Return True if safetensors supports this dtype."""
    return np.dtype(dtype) in _NAMES


def write_file(path: Path, tensors: Sequence[StateTensor], *, metadata: Mapping[str, str] | None = None) -> FileRecord:
    """Write ``path`` and sync it to disk.

    Args:
        path: the file, which must not exist.
        tensors: its content: this rank's part of each. Rows are read in order and once, about 1 MiB at a time.
        metadata: additional entries of the header's ``__metadata__``; the header's checksum covers them.

    Raises:
        CheckpointError: the disk is full, or the file cannot be written; the message names the file.
        NonFiniteTensor: a tensor contains a value that is not allowed.
    """
    # Largest item size first, so that every tensor is aligned to its item size.
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    locations = _locations(ordered)
    header = _header(locations, metadata or {})
    with checkpoint_errors(path, "written"), path.open("xb", buffering=0) as file:
        _write(file, header)  # reserves the space: digests have a fixed length
        for tensor, location in zip(ordered, locations.values(), strict=True):
            locations[tensor.name] = location._replace(digests="".join(_write_tensor(file, tensor, location)))
        header = _header(locations, metadata or {})
        file.seek(0)
        _write(file, header)
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    return FileRecord(size, xxhash.xxh3_128_hexdigest(header), {n: x.checksum() for n, x in locations.items()})


def _locations(tensors: Sequence[StateTensor]) -> dict[str, TensorLocation]:
    locations = {}
    start = 0
    for tensor in tensors:
        if not storable(tensor.dtype):
            raise TypeError(
                describe(tensor.name, f"dtype {tensor.dtype}", "a dtype of the safetensors format", "convert it first")
            )
        location = TensorLocation(tensor.dtype, tensor.part_shape, start, "")
        locations[tensor.name] = location._replace(digests="0" * (16 * location.blocks))
        start += location.bytes
    return locations


def _header(locations: dict[str, TensorLocation], metadata: Mapping[str, str]) -> bytes:
    digests = {f"{_DIGESTS}{name}": x.digests for name, x in locations.items()}
    entries: dict[str, object] = {"__metadata__": {**metadata, **digests}}
    for name, x in locations.items():
        end = x.start + x.bytes
        entries[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [x.start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES:
        got = f"a header of {len(text)} bytes"
        raise CheckpointError(describe("state", got, f"at most {HEADER_BYTES} for each rank", "save fewer tensors"))
    return struct.pack("<Q", len(text)) + text


def _write_tensor(file: FileIO, tensor: StateTensor, location: TensorLocation) -> Iterator[str]:
    for first, last in _blocks(location, 0, location.blocks):
        rows = tensor.block(first, last)
        if (value := not_allowed(rows, tensor.allowed)) is not None:
            expected = "finite numbers" if tensor.allowed == "finite" else "no NaN"
            raise NonFiniteTensor(f"{tensor.name}: got {value} in rows {first} to {last - 1}, expected {expected}")
        block = _bytes_of(rows)  # still cached for the checksum and the write
        yield xxhash.xxh3_64_hexdigest(block)
        _write(file, block)


def not_allowed(block: np.ndarray, allowed: Allowed) -> str | None:
    """Return ``"nan"`` or ``"inf"`` if ``block`` contains a value that is not ``allowed``, else None.

    Costs one or two passes over a block that is in the cache. Integers and bool never contain either.

    Example:
        >>> not_allowed(np.array([1.0, np.inf]), "finite"), not_allowed(np.array([1.0, np.inf]), "infinite")
        ('inf', None)
    """
    if allowed == "any" or block.size == 0:
        return None
    if block.dtype.kind == "c":
        block = block.view(block.real.dtype)
    if block.dtype in _INFINITY_BITS:
        largest = int((block.view(np.uint16) & 0x7FFF).max())
        infinity = _INFINITY_BITS[block.dtype]
        has_nan = largest > infinity
        has_infinity = largest == infinity
    elif block.dtype.kind == "f":
        # NaN if any element is
        most = block.max()
        least = block.min()
        has_nan = bool(np.isnan(most))
        has_infinity = bool(np.isinf(most) or np.isinf(least))
    elif block.dtype.name.startswith("float8"):
        has_nan = bool(np.isnan(block).any())
        has_infinity = bool(np.isinf(block).any())
    else:
        return None
    if has_nan:
        return "nan"
    return "inf" if has_infinity and allowed == "finite" else None


def _blocks(location: TensorLocation, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the rows ``[start, stop)`` of blocks ``first`` to ``last - 1``."""
    for block in range(first, last):
        start = block * location.block_rows
        yield start, min(start + location.block_rows, location.rows)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _write(file: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


class TensorFile(contextlib.AbstractContextManager["TensorFile"]):
    """A reader for a file written by :func:`write_file`. Use it as a context manager.

    Args:
        path: the file.
        record: the manifest's record of it, if known; the file is checked against it.
        truncated: the file may have another length, e.g. to find out which tensors a shorter one lacks.

    Attributes:
        size: its length in bytes.
        locations: its tensors by name.
        metadata: the ``metadata`` passed to ``write_file``.

    Raises:
        CorruptCheckpointError: the file is missing, not a regular file, or cannot be read; its length or header differs
            from the record; or its header describes other bytes than those of the file. A read raises it if bytes
            differ from those written.
    """

    def __init__(self, path: RunPath, record: FileRecord | None = None, *, truncated: bool = False):
        self.path = path
        self.size = 0
        self.bytes_read = 0
        self.metadata: dict[str, str] = {}
        self._file: ReadableFile | None = None
        try:
            self.locations = self._read_header(record, truncated)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the next read reopens it and still verifies what it reads."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, name: str, rows: range | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Return verified rows of a tensor.

        Args:
            name: the tensor's key.
            rows: the rows to read, ascending; all by default.
            out: the output array: C-contiguous, ``[len(rows), ...]``, of the tensor's dtype.
        """
        location = self._location(name)
        rows = range(location.rows) if rows is None else rows
        if out is None:
            out = np.empty((len(rows), *location.shape[1:]) if location.shape else (), location.dtype)
        flat = out.reshape(len(rows), *location.shape[1:])
        for start, stop, part in self.pieces(name, rows, flat):
            if not np.may_share_memory(part, flat):
                flat[start:stop] = part
        return out

    def pieces(self, name: str, rows: range, into: np.ndarray | None = None) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield ``(start, stop, array)`` in order: the verified rows for ``[start, stop)`` of the result.

        If ``into`` is given, blocks that are needed completely are read directly into it, and ``array`` is a view of
        it. Peak memory is about 1 MiB, or one row.
        """
        location = self._location(name)
        if not rows or not location.blocks:
            return
        step = location.block_rows
        end = min((rows[-1] // step + 1) * step, location.rows)
        until = self._data + location.start + end * location.row_bytes
        for first, last in _blocks(location, rows[0] // step, rows[-1] // step + 1):
            if self._data + location.start + last * location.row_bytes > self.size:  # before memory is allocated
                raise CorruptCheckpointError(f"{self.path}: truncated at byte {self.size}")
            start = max(0, -((rows.start - first) // rows.step))
            stop = min(len(rows), -((rows.start - last) // rows.step))
            if start >= stop:
                continue
            wanted = rows[start:stop]
            if into is not None and len(wanted) == last - first:
                block = into[start:stop]
            else:
                block = np.empty((last - first, *location.shape[1:]), location.dtype)
            self._fill(name, location, first, block, until)
            yield start, stop, block[wanted[0] - first : wanted[-1] - first + 1 : rows.step]

    def _location(self, name: str) -> TensorLocation:
        if name not in self.locations:
            raise CorruptCheckpointError(f"{self.path}: contains no {name!r}, although the manifest lists it")
        return self.locations[name]

    def _fill(self, name: str, location: TensorLocation, first: int, block: np.ndarray, until: int) -> None:
        """Read and verify the checksum block that starts at row ``first``; blocks up to byte ``until`` follow."""
        view = _bytes_of(block)
        self._read_into(view, self._data + location.start + first * location.row_bytes, until)
        number = first // location.block_rows
        if xxhash.xxh3_64_hexdigest(view) != location.digests[16 * number : 16 * number + 16]:
            raise CorruptCheckpointError(
                f"{self.path}: {name!r} is damaged in rows {first} to {first + len(block) - 1} (checksum differs)"
            )

    def _read_into(self, view: memoryview, offset: int, until: int) -> None:
        if self._file is None:
            self._file = open_readable(self.path)
        while view:
            got = self._file.read_into(view, offset, until)
            if got == 0:
                raise CorruptCheckpointError(f"{self.path}: truncated at byte {offset}")
            self.bytes_read += got
            view = view[got:]
            offset = offset + got

    def _read_header(self, record: FileRecord | None, truncated: bool) -> dict[str, TensorLocation]:
        self._file = open_readable(self.path)
        self.size = self._file.size
        if record is not None and self.size != record.bytes and not truncated:
            raise CorruptCheckpointError(f"{self.path}: has {self.size} bytes, but {record.bytes} were written")
        length = bytearray(8)
        self._read_into(memoryview(length), 0, min(_USUAL_HEADER, self.size))
        (count,) = struct.unpack("<Q", length)
        if count > min(self.size - 8, HEADER_BYTES):
            raise CorruptCheckpointError(f"{self.path}: is not a safetensors file (a header of {count} bytes)")
        header = bytearray(count)
        self._read_into(memoryview(header), 8, 8 + count)
        if record is not None and xxhash.xxh3_128_hexdigest(bytes(length + header)) != record.checksum:
            raise CorruptCheckpointError(f"{self.path}: its header is damaged (checksum differs)")
        self._data = 8 + count
        entries = json_of(header, self.path)
        if not isinstance(entries, dict) or "__metadata__" not in entries:
            raise CorruptCheckpointError(f"{self.path}: was not written by hvdkit (its header has no __metadata__)")
        metadata = checked(entries.pop("__metadata__"), _METADATA, f"{self.path}: __metadata__")
        self.metadata = {key: value for key, value in metadata.items() if not key.startswith(_DIGESTS)}
        locations = checked(entries, _HEADER, self.path)
        for name in locations:
            if (digests := metadata.get(f"{_DIGESTS}{name}")) is None:
                raise CorruptCheckpointError(f"{self.path}: was not written by hvdkit ({name!r} has no checksums)")
            locations[name] = locations[name]._replace(digests=digests)
        self._check_locations(locations, None if record is None else record.bytes - self._data)
        return locations

    def _check_locations(self, locations: Mapping[str, TensorLocation], data_bytes: int | None) -> None:
        """Check that tensors follow each other without gaps, and have a checksum for each block.

        The number of checksums bounds that of blocks by the length of the header.
        """
        end = 0
        for name, location in sorted(locations.items(), key=lambda item: (item[1].start, item[1].bytes)):
            if location.start != end:
                reason = f"{name!r} starts at byte {location.start}, expected {end}"
                raise CorruptCheckpointError(f"{self.path}: data_offsets: {reason}")
            end += location.bytes
            if len(location.digests) != 16 * location.blocks or not _DIGITS.fullmatch(location.digests):
                reason = f"{name!r} has no checksum of 16 digits for each of its {location.blocks} blocks"
                raise CorruptCheckpointError(f"{self.path}: __metadata__: {reason}")
        if data_bytes is not None and end != data_bytes:
            raise CorruptCheckpointError(f"{self.path}: its tensors have {end} bytes, and the file has {data_bytes}")


def _tensor_location(dtype: np.dtype, shape: tuple[int, ...], data_offsets: tuple[int, int]) -> TensorLocation:
    start, stop = data_offsets
    if math.prod(max(1, axis) for axis in shape) * dtype.itemsize > TOTAL_BYTES:
        raise FieldError(list(shape), f"at most {TOTAL_BYTES} bytes", "shape")
    location = TensorLocation(dtype, shape, start, "")
    if stop - start != location.bytes:
        expected = f"those of {location.bytes} bytes, as {dtype.name}{list(shape)} has"
        raise FieldError(f"{start} to {stop}", expected, "data_offsets")
    return location


_HEADER = mapping(
    typed(
        _tensor_location,
        dtype=choice(DTYPES),
        shape=array(integer(), most=DIMENSIONS),
        data_offsets=array(integer(), exactly=2),
    )
)
_METADATA = mapping(text(most=None), key=text(most=None))
