"""The files that a user's paths stand for, and requests to the servers that have them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hvdkit.data.files.program_end import pause, require_running
from hvdkit.errors import DataError, describe

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
_ATTEMPTS = 6
_WILDCARDS = re.compile(r"[*?[]")
_TIMEOUT = 60.0
_CHECK_SECONDS = 0.5  # between two checks whether the program ends
_LISTING = 10  # times as long: a folder of a store may have a million files
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
        DataError: A server does not answer, or a folder cannot be read.
        ImportError: fsspec asks for a package.

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
            found = [*_files_of(os.fspath(path), tuple(suffixes))] if path != "" else []
        except (ValueError, ImportError):
            raise
        except Exception as error:
            raise DataError(f"{os.fspath(path)} could not be listed: {shown(error)}") from error
        if not found:
            raise _nothing_found(os.fspath(path), suffixes)
        for file in found:
            if file.url in files:
                raise ValueError(describe("paths", f"{file.url} twice", "each file once", "list it once"))
            files[file.url] = file
    return [*files.values()]


def _nothing_found(path: str, suffixes: Sequence[str]) -> ValueError:
    others = len([*_files_of(path, ())]) if suffixes and path else 0
    if others:
        got, expected = f"{path}, a folder with {others} other files", f"files that end in {' or '.join(suffixes)}"
        return ValueError(describe("paths", got, expected, "pass a pattern to read them, e.g. 'folder/*'"))
    remedy = "check the spelling, and that this host sees the files"
    return ValueError(describe("paths", path or "''", "a file, a folder with files or a pattern", remedy))


def names_of(paths: Paths, files: Sequence[File]) -> list[str]:
    """Return the names of files relative to the folder that all paths have in common.

    They are the same on hosts that have the files in different folders, and do not change if files are added to a
    folder or pattern.
    """
    urls, folders = {file.url for file in files}, []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        filesystem, name = filesystem_of(os.fspath(path))
        url = name if is_local(filesystem) else filesystem.unstrip_protocol(name)
        is_folder = url not in urls and not _WILDCARDS.search(url)
        folders.append(url.split("/") if is_folder else _WILDCARDS.split(url)[0].split("/")[:-1])
    common = len([*itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))])
    return ["/".join(file.url.split("/")[common:]) for file in files]


def _files_of(path: str, suffixes: tuple[str, ...]) -> Iterator[File]:
    filesystem, name = filesystem_of(path)
    filesystem.invalidate_cache()  # of earlier listings
    root, found = name, {}
    wildcard = _WILDCARDS.search(name)
    if wildcard is None or "*" not in name or is_local(filesystem):  # names and URLs may contain "?" and "["
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = {name: retrying(filesystem, filesystem.info, name)}
    if not found and wildcard is not None:
        root = name[: wildcard.start()]
        found = retrying(filesystem, filesystem.glob, name, detail=True, patience=_LISTING)
    if root == name and any(info["type"] == "directory" for info in found.values()):
        listed: dict[str, dict[str, Any]] = retrying(filesystem, filesystem.find, name, detail=True, patience=_LISTING)
        found = {each: info for each, info in listed.items() if each.endswith(suffixes or "")}
    for each, info in sorted(found.items()):
        is_hidden = any(part.startswith(("_", ".")) for part in each.removeprefix(root).split("/"))
        if is_hidden:
            continue
        if info.get("islink") and each != name:
            info = filesystem.info(each)  # of the file, not of the link
            if info["type"] == "directory":
                remedy = "pass the folder that it links to as well"
                raise ValueError(describe("paths", f"{each}, a link to a folder", "files and folders", remedy))
        if info["type"] == "file":
            yield _file(filesystem, each, info)


def filesystem_of(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a path or URL, and the name in it."""
    import fsspec

    if "://" not in url:  # fsspec would take "::" in a name for a chain of file systems
        filesystem = fsspec.filesystem("file")
        return filesystem, filesystem._strip_protocol(url)
    return fsspec.core.url_to_fs(url)


def is_local(filesystem: AbstractFileSystem) -> bool:
    """Return True for files that the system's calls can read."""
    return "file" in filesystem.protocol


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


def _file(filesystem: AbstractFileSystem, name: str, info: dict[str, Any]) -> File:
    version = next((info[key] for key in ("mtime", "ETag", "etag", "LastModified", "updated") if info.get(key)), "")
    return File(
        name if is_local(filesystem) else filesystem.unstrip_protocol(name), int(info["size"] or 0), str(version)
    )


def retrying(
    filesystem: AbstractFileSystem, function: Callable[..., T], *arguments: Any, patience: float = 1, **options: Any
) -> T:
    """Call a function of a file system. A server is asked several times with growing pauses if it fails.

    Args:
        patience: How many times ``HVDKIT_DATA_TIMEOUT_SECONDS`` the server has for each answer. A request that takes
            longer is repeated once. File systems that fsspec does not run with asyncio have no limit.
    """
    if is_local(filesystem):
        return function(*arguments, **options)
    import tenacity

    seconds = number_setting("HVDKIT_DATA_TIMEOUT_SECONDS", _TIMEOUT) * patience
    if filesystem.async_impl:
        options["timeout"] = seconds
    attempts = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(_ATTEMPTS) | tenacity.stop_after_delay(2 * seconds),
        wait=tenacity.wait_random_exponential(0.1, LONGEST_WAIT),
        sleep=pause,
        retry=tenacity.retry_if_not_exception_type(
            (FileNotFoundError, InterruptedError, PermissionError, ValueError, TypeError)
        ),
        reraise=True,
    )
    try:
        return attempts(_answer, function, *arguments, **options)
    except TimeoutError as error:
        raise TimeoutError(f"no whole answer within {seconds:g} s (HVDKIT_DATA_TIMEOUT_SECONDS)") from error


def _answer(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a function in a thread that the end of the program does not wait for: it may be waiting for a server."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function(*arguments, **options))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, name="hvdkit-request", daemon=True).start()
    while not wait([answer], _CHECK_SECONDS).done:
        require_running()
    try:
        return answer.result()
    except FileNotFoundError as error:
        # fsspec reports every failure of an HTTP server as a missing file.
        cause = error.__cause__
        is_of_server = type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", None) not in (404, 410)
        if cause is not None and is_of_server:
            raise ConnectionError(shown(cause)) from error
        raise


def shown(error: BaseException) -> str:
    """Return the class and the message of an error."""
    return f"{type(error).__name__}: {error}"


def number_setting(name: str, default: float) -> float:
    """Return a setting from the environment. Raises ValueError if it is not a number of at least 0."""
    text = os.environ.get(name)
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ValueError(describe(name, text or "", "a number of at least 0", f"e.g. {name}={default:g}"))
    return value
