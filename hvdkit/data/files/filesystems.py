"""File systems, local and remote, and requests to servers that may fail."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from hvdkit.cluster.retries import Retries
from hvdkit.data.files.reading_ahead import pause, require_running
from hvdkit.errors import DataError, describe

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
_ATTEMPTS = 6
_TIMEOUT = 60.0
_FIRST_WAIT = 0.1
_FINAL = (DataError, FileNotFoundError, InterruptedError, PermissionError, ValueError, TypeError)
_CHECK_SECONDS = 0.5  # between two checks whether the program ends
LONGEST_WAIT = 20
"""Maximum pause between two attempts to reach a server, in seconds."""


def filesystem_of(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a path or URL, and the name in it. Raises ValueError for an unknown protocol."""
    import fsspec

    if "://" not in url:  # fsspec would take "::" in a name for a chain of file systems
        filesystem = fsspec.filesystem("file")
        return filesystem, filesystem._strip_protocol(url)
    try:
        fsspec.get_filesystem_class(url.partition("://")[0].split("::")[-1])
    except ValueError:
        remedy = "correct it, or register a file system with fsspec"
        raise ValueError(describe("paths", url, "a protocol of fsspec, e.g. s3:// or https://", remedy)) from None
    filesystem, name = fsspec.core.url_to_fs(url)
    return filesystem, name


def is_local(filesystem: AbstractFileSystem) -> bool:
    """Return True for files that the system's calls can read."""
    return "file" in filesystem.protocol


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, without waiting for the other end of a FIFO; OSError for other things."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return descriptor


def retrying(
    filesystem: AbstractFileSystem,
    function: Callable[..., T],
    *arguments: object,
    patience: float = 1,
    **options: object,
) -> T:
    """Call a function of a file system. A server is asked several times with growing pauses if it fails.

    Args:
        patience: How many times ``HVDKIT_DATA_TIMEOUT_SECONDS`` the server has for each answer. A request that takes
            longer is repeated once. File systems that fsspec does not run with asyncio have no limit.
    """
    if is_local(filesystem):
        return function(*arguments, **options)
    seconds = number_setting("HVDKIT_DATA_TIMEOUT_SECONDS", _TIMEOUT) * patience
    if filesystem.async_impl:
        options["timeout"] = seconds
    retries = Retries(_may_pass, 2 * seconds, _FIRST_WAIT, LONGEST_WAIT, attempts=_ATTEMPTS, sleep=pause)
    try:
        return retries.call(lambda: _answer(function, *arguments, **options))
    except TimeoutError as error:
        raise TimeoutError(f"no whole answer within {seconds:g} s (HVDKIT_DATA_TIMEOUT_SECONDS)") from error


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, _FINAL)


def _answer(function: Callable[..., T], *arguments: object, **options: object) -> T:
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
