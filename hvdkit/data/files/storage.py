"""Reads ranges of local and remote files."""

from __future__ import annotations

from typing import Any

from hvdkit.data.files.listing import File, file_of
from hvdkit.errors import DataError


def open_file(file: File) -> Any:
    """Open a file for reading, which must be as it was listed.

    Raises:
        DataError: It has disappeared or changed.
    """
    import fsspec

    filesystem, name = fsspec.core.url_to_fs(file.url)
    try:
        now = file_of(filesystem, name)
        if now != file:
            raise DataError(
                f"{file.url} has changed since it was listed: {file.size} bytes, version {file.version!r}, then "
                f"{now.size} bytes, version {now.version!r}; start again with the new files"
            )
        return name if "file" in filesystem.protocol else filesystem.open(name, "rb")
    except FileNotFoundError as error:
        raise DataError(f"{file.url} has disappeared since it was listed: {error}") from error
