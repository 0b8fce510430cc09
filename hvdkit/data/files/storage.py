"""Reads ranges of local and remote files, which stay open between reads, up to a number.

Opening a file can cost more than reading from it: Parquet has its footer to parse, ArrayRecord its index.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

from hvdkit.data.files import remote_cache
from hvdkit.data.files.filesystems import filesystem_of, is_local, open_regular
from hvdkit.data.files.listing import File, disappeared, require_unchanged
from hvdkit.errors import DataError

MOST_OPEN = 64
"""Number of files that stay open while no thread reads them."""
CHECK_SECONDS = 1.0
"""A file that is used is checked for changes again after this time."""
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gzip -d"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    **{b"BZh%d1AY&SY" % level: ("bzip2", "bzip2 -d") for level in range(1, 10)},
    b"PK\x03\x04": ("zip", "unzip"),
    b"\xfd7zXZ\x00": ("xz", "xz -d"),
    b"\x04\x22\x4d\x18": ("lz4", "lz4 -d"),
}


class OpenFile:
    """A file that is open for reading. A local one is opened when it is first read.

    Attributes:
        file: The file.
        path: The path of a local file, otherwise None.
    """

    def __init__(self, file: File):
        self.file = file
        self._filesystem, self._name = filesystem_of(file.url)
        self.path = self._name if is_local(self._filesystem) else None
        self._descriptor: int | None = None

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from ``start`` on.

        Memory is only allocated for bytes that the file has, whatever sizes it claims.
        """
        self._require(start, max(0, self.file.size - start), size)
        if self.path is None:
            data = remote_cache.read(self._filesystem, self._name, self.file, start, size)
        else:
            with self._named(start, size):
                data = os.pread(self._local(), size, start)
                while 0 < len(data) < size and (more := os.pread(self._local(), size - len(data), start + len(data))):
                    data += more  # Linux reads at most 2 GiB at once
        self._require(start, len(data), size)
        return data

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer of bytes from ``start`` of a local file on."""
        done = 0
        with self._named(start, len(buffer)):
            while done < len(buffer) and (count := os.preadv(self._local(), [buffer[done:]], start + done)):
                done += count
        self._require(start, done, len(buffer))

    def require_whole(self) -> None:
        """Raise DataError if a local file has been cut."""
        with self._named(0, self.file.size):
            self._require(0, os.fstat(self._local()).st_size, self.file.size)

    def _require(self, start: int, found: int, size: int) -> None:
        if found < size:
            raise DataError(f"{self.file.url} ends at byte {start + found}, expected at least {start + size}")

    def _local(self) -> int:
        if self._descriptor is None:
            with naming_errors(self.file):
                self._descriptor = open_regular(self._name)
        return self._descriptor

    @contextlib.contextmanager
    def _named(self, start: int, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"bytes {start} to {start + size} of {self.file.url} could not be read: {error}") from error

    def refuse_compressed(self) -> None:
        """Raise DataError for a compressed file, which has no access to single records."""
        start = self.read(0, min(self.file.size, max(map(len, _COMPRESSED))))
        for magic, (name, command) in _COMPRESSED.items():
            if start.startswith(magic):
                problem = f"{self.file.url} is compressed with {name}, which has no access to single records"
                raise DataError(f"{problem}; decompress it with `{command}`")


class FileStream(io.RawIOBase):
    """An open file as Python's file object, which allocates no more memory than the file has bytes."""

    def __init__(self, file: OpenFile):
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.file.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._file.file.size - self._position)
        size = rest if size is None or size < 0 else min(size, rest)
        data = self._file.read(self._position, size)
        self._position += size
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


# ---- files that stay open --------------------------------------------------------------------------------------


class Closable(Protocol):
    """What opening a file returns."""

    def close(self) -> None:
        """Close the file."""


C = TypeVar("C", bound=Closable)
_idle: OrderedDict[Hashable, list[tuple[Closable, float]]] = OrderedDict()  # with the times of their last checks
_lock = threading.Lock()
_is_closing = False  # the idle files are to be closed


def opened(file: File) -> AbstractContextManager[OpenFile]:
    """Open a file for reading, which must be as it was listed; see :func:`opened_as`."""
    return opened_as(file, _itself)


def _itself(file: OpenFile) -> OpenFile:
    return file


@contextlib.contextmanager
def opened_as(file: File, make: Callable[[OpenFile], C]) -> Iterator[C]:
    """Open a file with a library. What ``make`` returns is kept open for later reads, by one thread at a time.

    Raises:
        DataError: The file has disappeared or changed: checked before the first read, and once a second. Of remote
            files, this is checked when a part is downloaded.
    """
    key = (file, make)
    found: Closable | None = None
    checked = 0.0
    with _lock:
        idle = _idle.pop(key, [])
        if idle:
            found, checked = idle.pop()
        if idle:
            _idle[key] = idle
    _close_if_asked()
    try:
        if found is None or time.monotonic() - checked > CHECK_SECONDS:
            filesystem, name = filesystem_of(file.url)
            if is_local(filesystem):
                with naming_errors(file):
                    require_unchanged(file, filesystem, name)
            checked = time.monotonic()
        if found is None:
            found = _open(file, make)
        yield cast("C", found)  # what was made for this key before
    except BaseException:
        if found is not None:
            _close([found])
        raise
    excess: list[Closable] = []
    with _lock:
        _idle[key] = [*_idle.pop(key, []), (found, checked)]
        while sum(map(len, _idle.values())) > MOST_OPEN:  # close those that were not used for the longest time
            _, oldest = _idle.popitem(last=False)
            excess += [each for each, _ in oldest]
    _close_if_asked()
    _close(excess)


def _open(file: File, make: Callable[[OpenFile], C]) -> C:
    open_file = OpenFile(file)
    with naming_errors(file):
        try:
            return make(open_file)
        except BaseException:
            open_file.close()
            raise


@contextlib.contextmanager
def naming_errors(file: File) -> Iterator[None]:
    """Turn errors about opening a file into DataErrors that name it."""
    try:
        yield
    except FileNotFoundError as error:
        raise disappeared(file, error) from error
    except OSError as error:
        raise DataError(f"{file.url} cannot be opened: {error}") from error


def close_idle() -> None:
    """Close the files that no thread is reading: a file that is removed takes space on its disk until it is closed.

    Python may collect an abandoned epoch, which calls this, at any time, also while this thread holds the lock. So this
    never waits for the lock: the thread that holds it closes the files afterwards.
    """
    global _is_closing
    _is_closing = True
    _close_if_asked()


def _close_if_asked() -> None:
    """Close the idle files if this was asked for and no thread holds the lock."""
    global _is_closing
    while _is_closing and _lock.acquire(blocking=False):
        try:
            _is_closing = False
            idle = [each for files in _idle.values() for each, _ in files]
            _idle.clear()
        finally:
            _lock.release()
        _close(idle)


def _close(files: Iterable[Closable]) -> None:
    for each in files:
        with contextlib.suppress(Exception):  # what was wrong with it was raised by its reads
            each.close()
