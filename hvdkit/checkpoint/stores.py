"""Folders in object stores, as URLs of fsspec file systems: requests with retries, and errors that name the object.

A store has no rename, no sync and no locks: an object appears at once and whole. Listings are never cached, because
other ranks write to the same folder.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.retries import Retries
from hvdkit.errors import CheckpointError, CorruptCheckpointError, describe

if TYPE_CHECKING:
    from upath import UPath

T = TypeVar("T")

PATIENT_SECONDS = 900.0
"""How long a request of a save is repeated: training goes on meanwhile."""
ANSWER_SECONDS = 15.0
"""The same for all other requests, which someone waits for."""
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 20.0
_SILENT_SECONDS = 5.0
_SKEW_SECONDS = 300.0
"""How much the clocks of a host and of a store may differ until a refusal is explained by it; S3 refuses 15 minutes."""
_WARN_SECONDS = 60.0
_warned = [-_WARN_SECONDS]  # when the last warning was given
_READ_AHEAD = 4 * 2**20
_URL = re.compile(r"([a-zA-Z][\w+.-]*)(?:::|:/)")  # Path makes gs:/ of gs://
_LOCAL = ("file", "local")
_CONDITIONAL = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"}
_READ_ONLY = ("data", "git", "github", "http", "https", "libarchive", "reference", "tar", "zip")
# Packages whose exceptions are about a connection or a server's answer, and the exceptions that no repetition mends.
_CLIENTS = ("aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "httpx", "requests", "urllib3", "webdav4")
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_KEYS = dict.fromkeys(("s3", "s3a"), ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")) | dict.fromkeys(
    ("az", "abfs", "abfss"), ("AZURE_STORAGE_ACCOUNT_KEY",)
)
_CREDENTIALS = re.compile(r"credential|authenti|authoriz|forbidden|access ?denied|invalidaccesskey|signature", re.I)
_SECRETS = re.compile(
    r"(//)[^/@\s]+@|((?:token|secret|password|signature|access_?key|account_?key|sig)[\w-]*[=:]\s*)[^\s&'\"]+", re.I
)

# In a save: called before each attempt, raises to end it early.
_check_of_save: ContextVar[Callable[[], None] | None] = ContextVar("check of a save", default=None)


class UnansweredError(CheckpointError):
    """A store did not answer, or refused a request: nothing is known about what it has."""


@contextlib.contextmanager
def patiently(check: Callable[[], None]) -> Iterator[None]:
    """Repeat requests of this thread for :data:`PATIENT_SECONDS`; ``check`` is called before each attempt."""
    token = _check_of_save.set(check)
    try:
        yield
    finally:
        _check_of_save.reset(token)


def is_url(path: object) -> bool:
    """Return True for the URL of a store. ``file:///tmp/a`` is a local folder.

    Example:
        >>> is_url("s3://bucket/run"), is_url("runs/a"), is_url("file:///tmp/a")
        (True, False, False)
    """
    match = _URL.match(str(path))
    return match is not None and match[1] not in _LOCAL


def open_store(path: str | Path | UPath, argument: str) -> UPath:
    """Return the folder that a URL names. No request is made.

    Args:
        path: the URL, or a path of universal-pathlib, whose text may lack the host and the options of the client.
        argument: its name in messages.

    Raises:
        ValueError: the protocol is unknown, its package is not installed, or the URL does not name a folder of it.
    """
    expected = "a local folder, or a URL of an fsspec file system, e.g. s3://bucket/run"
    try:
        from fsspec import get_filesystem_class
        from upath import UPath
    except ImportError:
        remedy = "pip install 'hvdkit[files]', and the package of the store, e.g. s3fs or gcsfs"
        raise ValueError(describe(argument, without_secrets(str(path)), expected, remedy)) from None
    url = re.sub(r"^(\w[\w+.-]*):/(?!/)", r"\1://", str(path))
    got = without_secrets(url)
    given = path if isinstance(path, UPath) else url
    options = path.storage_options if isinstance(path, UPath) else {}
    scheme = urlsplit(url).scheme
    if "::" in url or scheme in _READ_ONLY:
        raise ValueError(describe(argument, got, f"{expected}; this one cannot be written", "pass another"))
    try:
        get_filesystem_class(scheme.partition("+")[0])  # webdav+http, as universal-pathlib writes it
        folder: UPath = UPath(given, **{**options, "use_listings_cache": False})
        try:
            client = folder.fs
        except TypeError:  # it takes no options of fsspec, e.g. webdav4, which keeps no listings
            folder = UPath(given, **options)
            client = folder.fs
        name = client._strip_protocol(folder.path).strip("/")
    except ImportError as error:
        raise ValueError(describe(argument, got, f"a store that can be reached ({error})", "install it")) from None
    except (ValueError, TypeError, OSError) as error:
        remedy = "correct it, or mount the store on every host (gcsfuse, mountpoint-s3, blobfuse)"
        raise ValueError(describe(argument, f"{got} ({error})", expected, remedy)) from None
    if not name:
        raise ValueError(describe(argument, got, "a bucket and a folder in it", "pass e.g. s3://bucket/run"))
    return folder


def without_secrets(text: str) -> str:
    """Return a text without what looks like a password, a key or a token.

    Example:
        >>> without_secrets("ftp://me:secret@host/run: token=abc")
        'ftp://***@host/run: token=***'
    """
    return _SECRETS.sub(lambda match: f"{match[1] or match[2]}***{'@' if match[1] else ''}", text)


def request(path: UPath, action: str, function: Callable[..., T], *arguments: object, **options: object) -> T:
    """Call a method of ``path.fs``, and again with growing pauses if the store does not answer.

    It is repeated for :data:`ANSWER_SECONDS`, or as :func:`patiently` says. The error of every function that makes
    requests is an UnansweredError, ``PATH: cannot be ACTION``, unless its docstring names another.

    Raises:
        FileNotFoundError, FileExistsError, IsADirectoryError: as the function raises them.
        UnansweredError: any other error, after the last attempt.
    """
    check = _check_of_save.get()
    seconds = ANSWER_SECONDS if check is None else PATIENT_SECONDS
    retries = Retries(
        _may_pass,
        seconds,
        _FIRST_PAUSE,
        _LONGEST_PAUSE,
        before=check or (lambda: None),
        before_pause=lambda passed: _warn(path, seconds, passed),
    )
    try:
        return retries.call(function, *arguments, **options)
    except (FileNotFoundError, FileExistsError, IsADirectoryError, CheckpointError):
        raise
    except Exception as error:
        reason = without_secrets(f"{type(error).__name__}: {error}".strip(": "))
        if (skew := _clock_skew(error)) is not None:
            remedy = f"{skew}: synchronize it (NTP: timedatectl set-ntp true, or chronyc makestep)"
        elif isinstance(error, PermissionError) or _CREDENTIALS.search(reason):
            keys = " ".join(f"--env {name}" for name in _KEYS.get(path.protocol, ()))  # not passed on by default
            remedy = "give this job credentials for the store, on every host"
            remedy += f"; with hvdkit run: {keys}" if keys else ""
        elif _may_pass(error):
            remedy = f"the store did not answer for {seconds:g} s: check the network, and start the command again"
        else:
            remedy = "check the URL and the store"
        raise UnansweredError(f"{path}: cannot be {action} ({reason}); {remedy}") from None


def _warn(path: UPath, seconds: float, passed: float) -> None:
    """Say that a store does not answer, at most once a minute."""
    now = time.monotonic()
    if passed > _SILENT_SECONDS and now - _warned[0] > _WARN_SECONDS:
        _warned[0] = now
        get_logger().warning("%s: the store does not answer; trying again for up to %g s", path, seconds)


def _clock_skew(error: BaseException) -> str | None:
    """Return the difference between this host's clock and the store's, if that is why a request was refused."""
    text = ""
    date: object = None
    cause: BaseException | None = error
    while cause is not None:
        text += f" {cause}"
        answer = getattr(cause, "response", None)  # of botocore's errors
        if isinstance(answer, dict):
            date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", date)
        cause = cause.__cause__
    if not isinstance(error, PermissionError):
        return None
    try:
        seconds = abs(email.utils.parsedate_to_datetime(str(date)).timestamp() - time.time())
    except ValueError:
        return "the clock of this host differs from the store's" if "RequestTimeTooSkewed" in text else None
    if seconds < _SKEW_SECONDS:
        return None
    return f"the clock of this host differs from the store's by {seconds / 60:.0f} minutes"


def _may_pass(error: BaseException) -> bool:
    """Return True for an error that a repetition may mend: of a connection, or of an overloaded server."""
    if isinstance(error, _FINAL) or _CREDENTIALS.search(f"{type(error).__name__} {error}"):
        return False
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _CLIENTS


def sizes(folder: UPath) -> dict[str, int | None]:
    """Return the names in a folder with their sizes in bytes; None for a folder. A missing folder is empty."""
    filesystem = folder.fs
    try:
        listed: list[dict[str, Any]] = request(folder, "read", filesystem.ls, folder.path, detail=True)
    except FileNotFoundError:
        return {}
    own = folder.path.rstrip("/")
    names = ((each["name"].rstrip("/"), each) for each in listed)
    return {
        name.rpartition("/")[2]: None if each["type"] == "directory" else int(each["size"])
        for name, each in names
        if name.strip("/") != own.strip("/")  # an object that marks the folder
    }


def sizes_of(folder: UPath, expected: Mapping[str, int]) -> Iterator[tuple[str, int | None]]:
    """Yield names with the sizes of their objects in bytes; None for one that is missing.

    Listings of some stores lag behind: an object that is listed with another size, or not at all, is asked for.
    """
    listed = sizes(folder)
    for name, size in expected.items():
        yield name, size if listed.get(name) == size else size_of(folder / name)


def size_of(path: UPath) -> int | None:
    """Return the size of an object in bytes, or None if it is missing."""
    try:
        found: dict[str, Any] = request(path, "read", path.fs.info, path.path)
    except FileNotFoundError:
        return None
    return None if found["type"] == "directory" else int(found["size"])


def exists(path: UPath) -> bool:
    """Return True if there is an object, or a folder with one in it."""
    try:
        request(path, "read", path.fs.info, path.path)
    except FileNotFoundError:
        return False
    return True


def has_objects(folder: UPath) -> bool:
    """Return True if there is an object in a folder; what is listed may have been removed."""
    return any(
        has_objects(folder / name) if size is None else exists(folder / name) for name, size in sizes(folder).items()
    )


def read_bounded(path: UPath, most: int) -> bytes:
    """Return the contents of an object; raise CorruptCheckpointError if it is missing or longer than ``most`` bytes."""
    data = read_start(path, most + 1)
    if data is None:
        raise CorruptCheckpointError(f"{path}: missing")
    if len(data) > most:
        raise CorruptCheckpointError(f"{path}: has more than {most} bytes")
    return data


def read_start(path: UPath, most: int) -> bytes | None:
    """Return at most ``most`` bytes of the start of an object, or None if it is missing."""
    try:
        return bytes(request(path, "read", path.fs.cat_file, path.path, start=0, end=most))
    except (FileNotFoundError, IsADirectoryError):
        return None


def write_bytes(path: UPath, data: bytes, *, create: bool = False) -> None:
    """Write a small object; with ``create``, raise FileExistsError if it exists.

    A missing bucket is a CheckpointError.
    Stores other than S3, GCS and Azure may check this before they write.
    """
    try:
        request(path, "written", _pipe, path, data, create=create)
    except FileNotFoundError as error:
        raise _without_bucket(path, error) from None


def has_conditional_writes(path: UPath) -> bool:
    """Return whether an object can be written on the condition that it is missing."""
    protocols = path.fs.protocol
    return bool(_CONDITIONAL & ({protocols} if isinstance(protocols, str) else {*protocols}))


def _pipe(path: UPath, data: bytes, *, create: bool) -> None:
    is_conditional = create and has_conditional_writes(path)
    if create and not is_conditional and path.fs.exists(path.path):
        raise FileExistsError(str(path))
    try:
        _write(path, path.fs.pipe_file, path.path, data, **({"mode": "create"} if is_conditional else {}))
    except Exception as error:
        if is_conditional and "precondition" in str(error).lower():  # HTTP status 412
            raise FileExistsError(str(path)) from None
        raise


def _write(path: UPath, function: Callable[..., object], *arguments: object, **options: object) -> None:
    """Call a function that writes a file. File systems with real folders, e.g. SFTP, need the one around it first."""
    try:
        function(*arguments, **options)
    except FileNotFoundError:
        if has_conditional_writes(path):  # an object store has no folders, so the bucket is missing
            raise
        path.fs.makedirs(path.fs._parent(path.path), exist_ok=True)
        function(*arguments, **options)


def upload(file: Path, path: UPath) -> None:
    """Copy a local file to an object, in several parts if it is large. Raises CheckpointError if that fails."""
    try:
        request(path, "written", _write, path, path.fs.put_file, str(file), path.path)
    except FileNotFoundError as error:
        raise _without_bucket(path, error) from None


def _without_bucket(path: UPath, error: FileNotFoundError) -> CheckpointError:
    reason = without_secrets(str(error)) or "not found"
    return CheckpointError(f"{path}: cannot be written ({reason}); create the bucket, or correct the URL")


def copy(source: UPath, target: UPath) -> None:
    """Copy an object in its store, without a download; skip one that is missing."""
    with contextlib.suppress(FileNotFoundError):
        request(target, "written", _write, target, source.fs.cp_file, source.path, target.path)


def remove(paths: Iterable[UPath]) -> None:
    """Remove objects; those that are missing are skipped."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            request(path, "removed", path.fs.rm_file, path.path)


def remove_folder(folder: UPath) -> None:
    """Remove the objects of a folder and of its folders."""
    for name, size in sizes(folder).items():
        if size is None:
            remove_folder(folder / name)
        else:
            remove([folder / name])


class StoreFile:
    """An object that is read by ranges, some megabytes at a time. Raises CorruptCheckpointError if it is missing.

    Attributes:
        size: its length in bytes.
    """

    def __init__(self, path: UPath):
        self._path = path
        size = size_of(path)
        if size is None:
            raise CorruptCheckpointError(f"{path}: missing")
        self.size = size
        self._start = 0  # of what is in memory
        self._read = b""

    def read_into(self, view: memoryview, offset: int, until: int) -> int:
        """Fill the start of ``view`` with bytes from ``offset`` on. See ``RegularFile``."""
        is_known = self._start <= offset < self._start + len(self._read)
        if not is_known and offset < self.size:
            end = min(max(offset + len(view), min(offset + _READ_AHEAD, until)), self.size)
            self._read = b""  # frees its memory
            try:
                self._read = bytes(
                    request(self._path, "read", self._path.fs.cat_file, self._path.path, start=offset, end=end)
                )
            except FileNotFoundError:
                raise CorruptCheckpointError(f"{self._path}: missing") from None
            self._start = offset
        first = offset - self._start
        data = memoryview(self._read)[first : first + len(view)] if offset < self.size else b""
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Free what was read ahead."""
        self._read = b""
