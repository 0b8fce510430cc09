"""Reads remote files in chunks, which are kept on the local disk up to a limit.

The folder is ``HVDKIT_DATA_CACHE``, by default "data" in the user's cache; the limit is ``HVDKIT_DATA_CACHE_GB``, by
default 20. All ranks of a host share it: the first that needs a chunk gets it from the server. The chunks that have not
been used for the longest time are removed first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
import xxhash

from hvdkit.cluster.logs import get_logger
from hvdkit.data.files.filesystems import number_setting, open_regular, shown
from hvdkit.data.files.listing import File, disappeared, require_unchanged
from hvdkit.data.files.ranges import read_range
from hvdkit.data.files.reading_ahead import pause
from hvdkit.errors import DataError
from hvdkit.machine.replacing import replaced

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_OWN_FILES = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{32}\.[0-9a-f]{8}")  # chunks, and those that are being written
_CHUNK = 2**22
_CHECKSUM = 8  # bytes after each chunk
_DEFAULT_GB = 20.0
# After so many chunks written by this process, old ones are looked for. The limit may be exceeded by as many per rank.
_BETWEEN_SWEEPS = 16
_ABANDONED = 3600  # seconds after which a temporary file is that of a process that was killed
# Instead of the version of a file whose server gives none: its chunks serve this process only, as it may be replaced.
_UNKNOWN_VERSION = secrets.token_hex(8)
_LONGEST_TURN = 30  # seconds to wait for another process that reads the same chunk
_written = 0
_has_warned = False


def folder() -> Path:
    """Return the folder of the cache."""
    return Path(os.environ.get("HVDKIT_DATA_CACHE") or Path(platformdirs.user_cache_dir("hvdkit"), "data"))


def limit() -> float:
    """Return the limit of the cache in bytes. Raises ValueError if the setting is invalid."""
    return number_setting("HVDKIT_DATA_CACHE_GB", _DEFAULT_GB) * 1e9


def read(filesystem: AbstractFileSystem, name: str, file: File, start: int, size: int) -> bytes:
    """Return up to ``size`` bytes of a remote file from ``start`` on."""
    stop = min(start + size, file.size)
    chunks = range(start // _CHUNK, -(-stop // _CHUNK))
    data = b"".join(_chunk(filesystem, name, file, each) for each in chunks)
    skipped = start - chunks.start * _CHUNK
    return data[skipped : skipped + max(0, stop - start)]


def _chunk(filesystem: AbstractFileSystem, name: str, file: File, number: int) -> bytes:
    start = number * _CHUNK
    stop = min((number + 1) * _CHUNK, file.size)
    version = file.version or _UNKNOWN_VERSION
    path = folder() / xxhash.xxh3_128_hexdigest(f"{file.url} {file.size} {version} {number}".encode())
    if (kept := _kept(path, stop - start)) is not None:
        return kept
    with _turn(path):
        if (kept := _kept(path, stop - start)) is not None:
            return kept
        data = _download(filesystem, name, file, start, stop)
        try:
            if limit() > 0:
                _keep(path, data)
        except OSError as error:
            _warn(path.parent, error)
    return data


def _kept(path: Path, size: int) -> bytes | None:
    """Return a chunk of the cache, or None. Its name is that of one version of a file; its checksum follows it."""
    with contextlib.suppress(OSError):
        with os.fdopen(open_regular(path), "rb") as file:
            kept = file.read(size + _CHECKSUM + 1)
        data = kept[:size]
        if kept[size:] == xxhash.xxh3_64_digest(data):
            with contextlib.suppress(OSError):  # a cache that another user wrote
                os.utime(path)
            return data
    return None


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait while another thread or process of this host reads the chunk ``path``, up to a limit."""
    with contextlib.ExitStack() as stack:
        lock = None
        with contextlib.suppress(OSError):  # a folder that cannot be written
            locks = path.parent / "locks"
            locks.mkdir(parents=True, exist_ok=True)
            descriptor = open_regular(locks / path.name[:3], os.O_WRONLY | os.O_CREAT)
            lock = stack.enter_context(os.fdopen(descriptor, "wb"))
        deadline = time.monotonic() + _LONGEST_TURN
        while lock is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pause(0.01)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield


def _download(filesystem: AbstractFileSystem, name: str, file: File, start: int, stop: int) -> bytes:
    """Return bytes of a remote file, which has not changed until then."""
    try:
        data = read_range(filesystem, name, file, start, stop)
        require_unchanged(file, filesystem, name)
    except FileNotFoundError as error:
        raise disappeared(file, error) from error
    except DataError:
        raise
    except Exception as error:
        where = f"bytes {start} to {stop} of {file.url}"
        raise DataError(f"{where} could not be read: {shown(error)}") from error
    return data


def _keep(path: Path, data: bytes) -> None:
    global _written
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with replaced(path, temporary):
        temporary.write_bytes(data + xxhash.xxh3_64_digest(data))
    _written += 1
    if _written % _BETWEEN_SWEEPS == 1:
        _sweep(path.parent)


def _sweep(cache: Path) -> None:
    """Remove what killed processes left, and the oldest chunks beyond the limit."""
    found = []
    for path in cache.iterdir():
        with contextlib.suppress(OSError):
            if not _OWN_FILES.fullmatch(path.name) or not path.is_file():
                continue  # the user may have chosen a folder that has other files
            status = path.stat()
            if path.name.startswith(".") and status.st_mtime < time.time() - _ABANDONED:
                path.unlink()
            else:
                found.append((status.st_mtime, status.st_size, path))
    excess = sum(size for _, size, _ in found) - limit()
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            excess -= size


def _warn(cache: Path, error: OSError) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        get_logger().warning("data cache: cannot write %s: %s; continuing without it", cache, error)
