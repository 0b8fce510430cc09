"""Recognizes the folders of Delta Lake, Hudi and Iceberg tables.

Such a folder has files of earlier versions, and rows that are marked as deleted: which rows are valid is in the table's
log. Reading all files would yield rows that were deleted or replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from hvdkit.data.files.filesystems import is_local, retrying
from hvdkit.errors import describe

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class _TableFormat(NamedTuple):
    """A format, the folder of its log in that of a table, how the log's files end, and a library that lists files."""

    name: str
    log: str
    suffix: str
    files: str


_FORMATS = (
    _TableFormat("Delta Lake", "_delta_log", "", "deltalake's DeltaTable(...).file_uris()"),
    _TableFormat("Hudi", ".hoodie", "", "the hudi package"),
    _TableFormat("Iceberg", "metadata", ".metadata.json", "pyiceberg's table.scan().plan_files()"),
)
# Folders of a pattern's files in which a server is asked for logs: one request each and format.
_MOST_REMOTE_FOLDERS = 64


def refuse_tables(found: Iterable[str]) -> None:
    """Raise ValueError if the files of a folder, at any depth, have the log of a table among them."""
    for name in found:
        for each in _FORMATS:
            folder, log, file = name.rpartition(f"/{each.log}/")
            if log and file and file.endswith(each.suffix) and (each.suffix == "" or "/" not in file):
                remedy = f"export its present rows to Parquet, or pass the files that {each.files} returns, one by one"
                got = f"{folder or '/'}, a table of {each.name}"
                raise ValueError(describe("paths", got, "files whose rows are all valid", remedy))


def refuse_parts_of_tables(filesystem: AbstractFileSystem, root: str, found: Iterable[str]) -> None:
    """Raise ValueError if files are those of a table.

    Args:
        root: The folder that the user passed, or in which a pattern begins.
        found: The files there.
    """
    folders = {root.rstrip("/"): None}
    above = root.rstrip("/")
    while "/" in above and ("=" in above.rpartition("/")[2] or above.endswith("/data")):
        above = above.rpartition("/")[0]  # of a table's partition, or of the data of Iceberg
        folders[above] = None
    for name in found:
        parts = name.removeprefix(root).strip("/").split("/")[:-1]
        for depth, part in enumerate(parts, 1):
            if "=" not in part:
                folders["/".join([root.rstrip("/"), *parts[:depth]])] = None
    for folder in [*folders] if is_local(filesystem) else [*folders][:_MOST_REMOTE_FOLDERS]:
        for each in _FORMATS:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                refuse_tables(retrying(filesystem, filesystem.ls, f"{folder}/{each.log}", detail=False))
