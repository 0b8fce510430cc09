"""The files that a user's paths stand for."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hvdkit.errors import describe

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
_ATTEMPTS = 6
LONGEST_WAIT = 20
"""Maximum pause between two attempts to reach a server, in seconds."""
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class File(NamedTuple):
    """A file as it was when it was listed.

    Attributes:
        url: The path of a local file; ``protocol://...`` of a remote one.
        size: In bytes.
        version: What changes with the content: the modification time, or an object store's tag. "" if unknown.
    """

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        """The last part of the path, which is the same on all hosts."""
        return self.url.rsplit("/", 1)[-1]


def list_files(paths: Paths, suffixes: Sequence[str] = ()) -> list[File]:
    """Return the files of paths, folders, glob patterns and URLs.

    The files of a folder, at any depth, and of a pattern are sorted by path. Names that begin with "_" or "." are left
    out, as by Spark and Arrow. If ``suffixes`` is not empty, a folder's other files are left out as well.

    Args:
        paths: One or a sequence of these, whose order is kept. URLs are those that fsspec knows: ``s3://``, ``gs://``,
            ``https://`` and others, if the package that fsspec asks for is installed.

    Raises:
        TypeError: A path is not a string or path.
        ValueError: No file was found, or one is listed twice.
        ImportError: fsspec asks for a package.

    Example:
        >>> list_files("data/day_*.parquet")  # doctest: +SKIP
        [File(url='/data/day_0.parquet', size=20145, version='1700000000.5')]
    """
    each = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files: dict[str, File] = {}
    for path in each:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(describe("paths", type(path).__name__, "paths, or a sequence of them", "pass strings"))
        found = [*_files_of(os.fspath(path), tuple(suffixes))]
        if not found:
            remedy = "check the spelling, and that this host sees the files"
            raise ValueError(describe("paths", os.fspath(path), "a file, a folder with files or a pattern", remedy))
        for file in found:
            if file.url in files:
                raise ValueError(describe("paths", f"{file.url} twice", "each file once", "list it once"))
            files[file.url] = file
    return [*files.values()]


def _files_of(path: str, suffixes: tuple[str, ...]) -> Iterator[File]:
    import fsspec

    filesystem, name = fsspec.core.url_to_fs(path)
    root, found = name, {}
    if (wildcard := re.search(r"[*?[]", name)) is not None:
        root, found = name[: wildcard.start()], retrying(filesystem.glob, name, detail=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            found = {name: retrying(filesystem.info, name)}
    if root == name and any(info["type"] == "directory" for info in found.values()):
        listed: dict[str, dict[str, Any]] = retrying(filesystem.find, name, detail=True)
        found = {each: info for each, info in listed.items() if each.endswith(suffixes or "")}
    for each, info in sorted(found.items()):
        is_hidden = any(part.startswith(("_", ".")) for part in each.removeprefix(root).split("/"))
        if info["type"] == "file" and not is_hidden:
            yield _file(filesystem, each, info)


def current_file(filesystem: AbstractFileSystem, name: str) -> File:
    """Return a file as it is now. Raises FileNotFoundError."""
    return _file(filesystem, name, retrying(filesystem.info, name))


def _file(filesystem: AbstractFileSystem, name: str, info: dict[str, Any]) -> File:
    version = next((info[key] for key in ("mtime", "ETag", "etag", "LastModified", "updated") if info.get(key)), "")
    is_local = "file" in filesystem.protocol
    return File(name if is_local else filesystem.unstrip_protocol(name), int(info["size"] or 0), str(version))


def retrying(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a function of a file system, several times with growing pauses if it fails."""
    import tenacity

    attempts = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_random_exponential(0.1, LONGEST_WAIT),
        retry=tenacity.retry_if_not_exception_type((FileNotFoundError, PermissionError, ValueError, TypeError)),
        reraise=True,
    )
    return attempts(function, *arguments, **options)
