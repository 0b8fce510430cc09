"""Reads ranges of local and remote files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from hvdkit.data.files.listing import File, file_of
from hvdkit.errors import DataError


class OpenFile:
    """A file that is open for reading. Its methods may be called by several threads at once.

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
            DataError: The file ends before.
        """
        if self._descriptor is None:
            data = self._filesystem.cat_file(self._name, start=start, end=start + size)
        else:
            data = os.pread(self._descriptor, size, start)
            while 0 < len(data) < size and (more := os.pread(self._descriptor, size - len(data), start + len(data))):
                data += more
        if len(data) < size:
            raise DataError(f"{self.file.url} ends at byte {start + len(data)}, expected at least {start + size}")
        return data

    def as_python_file(self) -> Any:
        """Return a path, or a file object for libraries that read files themselves."""
        return self.path or self._filesystem.open(self._name, "rb")


@contextlib.contextmanager
def opened(file: File) -> Iterator[OpenFile]:
    """Open a file for reading, which must be as it was listed.

    Raises:
        DataError: It has disappeared or changed.
    """
    import fsspec

    filesystem, name = fsspec.core.url_to_fs(file.url)
    try:
        now = file_of(filesystem, name)
        opened_file = OpenFile(file, filesystem, name)
    except FileNotFoundError as error:
        raise DataError(f"{file.url} has disappeared since it was listed: {error}") from error
    with contextlib.closing(opened_file):
        if now != file:
            raise DataError(
                f"{file.url} has changed since it was listed: {file.size} bytes, version {file.version!r}, then "
                f"{now.size} bytes, version {now.version!r}; start again with the new files"
            )
        yield opened_file
