"""Reads ranges of local and remote files."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

from hvdkit.data.files import remote_cache
from hvdkit.data.files.listing import File, current_file
from hvdkit.errors import DataError


class OpenFile:
    """A file that is open for reading. Several threads may read at once.

    Attributes:
        file: The file.
        path: The path of a local file, otherwise None.
    """

    def __init__(self, file: File, filesystem: Any, name: str):
        self.file, self._filesystem, self._name = file, filesystem, name
        self.path = name if "file" in filesystem.protocol else None
        self._descriptor = None if self.path is None else os.open(name, os.O_RDONLY)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)

    def read(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from ``start`` on.

        Raises:
            DataError: The file ends before, or a server does not answer.
        """
        if self._descriptor is None:
            data = remote_cache.read(self._filesystem, self._name, self.file, start, size)
        else:
            data = os.pread(self._descriptor, size, start)
            while 0 < len(data) < size and (more := os.pread(self._descriptor, size - len(data), start + len(data))):
                data += more  # Linux reads at most 2 GiB at once
        if len(data) < size:
            raise DataError(f"{self.file.url} ends at byte {start + len(data)}, expected at least {start + size}")
        return data

    def for_library(self) -> Any:
        """Return a path, or a file object, for libraries that read files themselves."""
        return self.path or _Raw(self)


class _Raw(io.RawIOBase):
    """A remote file as Python's file object."""

    def __init__(self, file: OpenFile):
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.file.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._file.file.size - self._position))
        buffer[:size] = self._file.read(self._position, size)
        self._position += size
        return size


@contextlib.contextmanager
def opened(file: File) -> Iterator[OpenFile]:
    """Open a file for reading, which must be as it was listed.

    Raises:
        DataError: It has disappeared or changed. For remote files, this is checked once.
    """
    import fsspec

    filesystem, name = fsspec.core.url_to_fs(file.url)
    try:
        if "file" in filesystem.protocol:
            _require_unchanged(file)
        else:
            _require_unchanged_once(file)
        open_file = OpenFile(file, filesystem, name)
    except FileNotFoundError as error:
        raise DataError(f"{file.url} has disappeared since it was listed: {error}") from error
    with contextlib.closing(open_file):
        yield open_file


def _require_unchanged(file: File) -> None:
    import fsspec

    now = current_file(*fsspec.core.url_to_fs(file.url))
    if now != file:
        raise DataError(
            f"{file.url} has changed since it was listed: {file.size} bytes, version {file.version!r}, then "
            f"{now.size} bytes, version {now.version!r}; start again with the new files"
        )


_require_unchanged_once = cache(_require_unchanged)
