"""The files that a user's paths stand for."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hvdkit.data.files.filesystems import filesystem_of, is_local, retrying, shown
from hvdkit.data.files.reading_ahead import in_threads
from hvdkit.errors import DataError, describe

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_WILDCARDS = re.compile(r"[*?[]")
_LISTING = 10  # times as long: a folder of a store may have a million files
# What a file system reports of a file's version: GCS has the first, local ones have the second.
_VERSIONS = "generation", "mtime", "ETag", "etag", "LastModified", "Last-Modified", "updated"
Info: TypeAlias = dict[str, Any]  # what fsspec reports of a file: "type", "size" and others
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class File(NamedTuple):
    """A file as it was when it was listed.

    Attributes:
        url: The path of a local file; ``protocol://...`` of a remote one.
        size: In bytes.
        version: What changes with the content: the modification time, or an object store's tag or generation. "" if
            unknown.
    """

    url: str
    size: int
    version: str


def list_files(paths: Paths, suffixes: Sequence[str] = ()) -> list[File]:
    """Return the files of paths, folders, glob patterns and URLs.

    The files of a folder, at any depth, and of a pattern are sorted by path. Names that begin with "_" or "." are left
    out, as by Spark and Arrow. If ``suffixes`` is not empty, a folder's other files are left out as well.

    Args:
        paths: One or a sequence of these, whose order is kept. URLs are those that fsspec knows: ``s3://``, ``gs://``,
            ``https://`` and others, if the package that fsspec asks for is installed.

    Raises:
        ValueError: No file was found, or one is listed twice; a path is the folder of a Delta Lake, Hudi or Iceberg
            table; or what it stands for is neither a file nor a folder.
        DataError: A server does not answer, or a folder cannot be read.

    Example:
        >>> list_files("data/day_*.parquet")  # doctest: +SKIP
        [File(url='/data/day_0.parquet', size=20145, version='1700000000.5')]
    """
    if not isinstance(paths, str | os.PathLike | Iterable):
        raise TypeError(describe("paths", paths, "paths, or a sequence of them", "pass e.g. a folder"))
    each = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not each:
        raise ValueError(describe("paths", each, "at least one path", "pass e.g. a folder"))
    files: dict[str, File] = {}
    for path in each:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(describe("paths", type(path).__name__, "paths, or a sequence of them", "pass strings"))
        try:
            found = _files_of(*_found_at(os.fspath(path), tuple(suffixes))) if path != "" else []
            if not found:
                raise _nothing_found(os.fspath(path), suffixes)
        except (ValueError, ImportError, DataError):
            raise
        except Exception as error:
            raise DataError(f"{os.fspath(path)} could not be listed: {shown(error)}") from error
        for file in found:
            if file.url in files:
                raise ValueError(describe("paths", f"{file.url} twice", "each file once", "list it once"))
            files[file.url] = file
    return [*files.values()]


def _nothing_found(path: str, suffixes: Sequence[str]) -> ValueError:
    others = len(_found_at(path, ())[1]) if suffixes and path else 0
    if others:
        got = f"{path}, a folder with {others} other files"
        expected = f"files that end in {' or '.join(suffixes)}"
        return ValueError(describe("paths", got, expected, "pass a pattern to read them, e.g. 'folder/*'"))
    remedy = "check the spelling, and that this host sees the files"
    return ValueError(describe("paths", path or "''", "a file, a folder with files or a pattern", remedy))


def names_of(paths: Paths, files: Sequence[File]) -> list[str]:
    """Return the names of files relative to the folder that all paths have in common.

    They are the same on hosts that have the files in different folders, and do not change if files are added to a
    folder or pattern.
    """
    urls = {file.url for file in files}
    folders = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        filesystem, name = filesystem_of(os.fspath(path))
        url = name if is_local(filesystem) else filesystem.unstrip_protocol(name).rstrip("/")
        is_folder = url not in urls and not _WILDCARDS.search(url)
        folders.append(url.split("/") if is_folder else _WILDCARDS.split(url)[0].split("/")[:-1])
    common = len([*itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))])
    return ["/".join(file.url.split("/")[common:]) for file in files]


def _files_of(filesystem: AbstractFileSystem, found: Mapping[str, Info]) -> list[File]:
    """Return what was found with sizes, which the listings of HTTP servers do not have."""
    unknown = [name for name, info in found.items() if info["size"] is None]
    asked = in_threads(lambda name: retrying(filesystem, filesystem.info, name), unknown) if unknown else []
    found = {**found, **dict(zip(unknown, asked, strict=True))}
    return [_file(filesystem, name, info) for name, info in found.items()]


def _found_at(path: str, suffixes: tuple[str, ...]) -> tuple[AbstractFileSystem, dict[str, Info]]:
    """Return the file system of a path, and the files there, by name."""
    filesystem, name = filesystem_of(path)
    filesystem.invalidate_cache()  # of earlier listings
    root = name
    found = {}
    wildcard = _WILDCARDS.search(name)
    is_http = "http" in filesystem.protocol
    is_page = is_http and name.endswith("/")  # with links to files
    if is_page:
        found = {name: {"type": "directory"}}
    elif wildcard is None or "*" not in name or is_local(filesystem):  # names and URLs may contain "?" and "["
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = {name: retrying(filesystem, filesystem.info, name)}
    is_folder = any(info["type"] == "directory" for info in found.values())
    if wildcard is not None and not is_folder and ("*" in name or not found):
        root = name[: wildcard.start()]
        found |= retrying(filesystem, filesystem.glob, name, detail=True, patience=_LISTING)
        if not is_http:
            _refuse_parts_of_tables(filesystem, root.rpartition("/")[0], found)
    if is_folder:
        options = {"on_error": "raise"} if is_page else {}
        listed = retrying(filesystem, filesystem.find, name, detail=True, patience=_LISTING, **options)
        _refuse_tables(listed)
        if not is_http:
            _refuse_parts_of_tables(filesystem, root, ())
        # A page without links has itself in its list, without a type.
        found = {each: info for each, info in listed.items() if "type" in info and each.endswith(suffixes or "")}
    files: dict[str, Info] = {}
    folders = []
    for each, info in _shown(filesystem, name, root, found):
        if info["type"] == "file":
            files[each.replace("/./", "/")] = info
        elif info["type"] == "directory":
            folders.append(each)
        else:
            raise _no_file(each, _kind_of(filesystem, each, info))
    if not is_folder and "**" not in name:
        for folder in folders:
            if not any(file.startswith(f"{folder.rstrip('/')}/") for file in files):
                raise _no_file(folder, "a folder that the pattern matches")
    return filesystem, files


def _shown(
    filesystem: AbstractFileSystem, path: str, root: str, found: Mapping[str, Info]
) -> Iterator[tuple[str, Info]]:
    """Yield what was found, by name, without hidden names; links as what they link to."""
    is_http = "http" in filesystem.protocol
    first = 1 if root and not root.endswith("/") else 0  # what follows "train" in "train*" is not a whole name
    for each, info in sorted(found.items()):
        parts = [part for part in each.removeprefix(root).split("/")[first:] if part != "."]
        sorts_page = is_http and each != path and any(mark in each for mark in "?#")
        if sorts_page or any(part.startswith(("_", ".")) for part in parts):
            continue
        if info.get("islink") and each != path:
            info = retrying(filesystem, filesystem.info, each)  # of the file, not of the link
            if info["type"] == "directory":
                remedy = "pass the folder that it links to as well"
                raise ValueError(describe("paths", f"{each}, a link to a folder", "files and folders", remedy))
        yield each, info


def _no_file(name: str, kind: str) -> ValueError:
    remedy = "pass folders without a pattern, and keep other things out of them"
    return ValueError(describe("paths", f"{name}, {kind}", "regular files", remedy))


def _kind_of(filesystem: AbstractFileSystem, name: str, info: Info) -> str:
    """Return what something is that is neither a file nor a folder."""
    if is_local(filesystem):
        mode = Path(name).stat().st_mode
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
        return kinds.get(stat.S_IFMT(mode), "a special file")
    return f"a thing of type {info['type']!r}"


def require_unchanged(file: File, filesystem: AbstractFileSystem, name: str) -> None:
    """Raise DataError if a file has disappeared, or is not as it was listed."""
    filesystem.invalidate_cache()  # of listings
    try:
        now = _file(filesystem, name, retrying(filesystem, filesystem.info, name))
    except FileNotFoundError as error:
        raise disappeared(file, error) from error
    if now != file:
        raise DataError(
            f"{file.url} has changed since it was listed: {file.size} bytes, version {file.version!r}, then "
            f"{now.size} bytes, version {now.version!r}; start again with the new files"
        )


def disappeared(file: File, error: FileNotFoundError) -> DataError:
    """Return the error about a file that no longer exists."""
    return DataError(f"{file.url} has disappeared since it was listed: {error}")


def _file(filesystem: AbstractFileSystem, name: str, info: Info) -> File:
    url = name if is_local(filesystem) else filesystem.unstrip_protocol(name)
    if info["type"] != "file":
        raise DataError(f"{url} is no longer a regular file, but {_kind_of(filesystem, name, info)}")
    if info["size"] is None:
        raise DataError(f"{url}: its server does not report its size; copy the files to a disk")
    return File(url, int(info["size"]), str(next((info[key] for key in _VERSIONS if info.get(key)), "")))


# ---- tables ----------------------------------------------------------------------------------------------------
# The folder of a Delta Lake, Hudi or Iceberg table has files of earlier versions, and rows that are marked as deleted:
# which rows are valid is in the table's log. Reading all files would yield rows that were deleted or replaced.


class _TableFormat(NamedTuple):
    """A format, the folder of its log in that of a table, how the log's files end, and a library that lists files."""

    name: str
    log: str
    suffix: str
    files: str


_TABLE_FORMATS = (
    _TableFormat("Delta Lake", "_delta_log", "", "deltalake's DeltaTable(...).file_uris()"),
    _TableFormat("Hudi", ".hoodie", "", "the hudi package"),
    _TableFormat("Iceberg", "metadata", ".metadata.json", "pyiceberg's table.scan().plan_files()"),
)
# Folders of a pattern's files in which a server is asked for logs: one request each and format.
_MOST_REMOTE_FOLDERS = 64


def _refuse_tables(found: Iterable[str]) -> None:
    """Raise ValueError if the files of a folder, at any depth, have the log of a table among them."""
    for name in found:
        for each in _TABLE_FORMATS:
            folder, log, file = name.rpartition(f"/{each.log}/")
            if log and file and file.endswith(each.suffix) and (each.suffix == "" or "/" not in file):
                remedy = f"export its present rows to Parquet, or pass the files that {each.files} returns, one by one"
                got = f"{folder or '/'}, a table of {each.name}"
                raise ValueError(describe("paths", got, "files whose rows are all valid", remedy))


def _refuse_parts_of_tables(filesystem: AbstractFileSystem, root: str, found: Iterable[str]) -> None:
    """Raise ValueError if the files ``found`` are those of a table.

    ``root`` is the folder that the user passed, or in which a pattern begins.
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
        for each in _TABLE_FORMATS:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                _refuse_tables(retrying(filesystem, filesystem.ls, f"{folder}/{each.log}", detail=False))
