"""Reads remote files in chunks, which are kept on the local disk up to a limit.

The folder is ``HVDKIT_DATA_CACHE``, by default "data" in the user's cache; the limit is ``HVDKIT_DATA_CACHE_GB``, by
default 20. All ranks of a host share it. The chunks that have not been used for the longest time are removed first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

import platformdirs
import xxhash

from hvdkit.cluster.logs import get_logger
from hvdkit.data.files.listing import File, retrying
from hvdkit.errors import DataError

_CHUNK = 2**22
_DEFAULT_GB = 20.0
# After so many chunks written by this process, old ones are looked for. The limit may be exceeded by as many per rank.
_BETWEEN_SWEEPS = 16
_written = 0


def folder() -> Path:
    """Return the folder of the cache."""
    return Path(os.environ.get("HVDKIT_DATA_CACHE") or Path(platformdirs.user_cache_dir("hvdkit"), "data"))


def read(filesystem: Any, name: str, file: File, start: int, size: int) -> bytes:
    """Return up to ``size`` bytes of a remote file from ``start`` on."""
    stop = min(start + size, file.size)
    chunks = range(start // _CHUNK, -(-stop // _CHUNK))
    data = b"".join(_chunk(filesystem, name, file, each) for each in chunks)
    skipped = start - chunks.start * _CHUNK
    return data[skipped : skipped + max(0, stop - start)]


def _chunk(filesystem: Any, name: str, file: File, number: int) -> bytes:
    start, stop = number * _CHUNK, min((number + 1) * _CHUNK, file.size)
    path = folder() / xxhash.xxh3_128_hexdigest(f"{file.url} {file.size} {file.version} {number}".encode())
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        if len(data) == stop - start:
            os.utime(path)
            return data
    data = _download(filesystem, name, file, start, stop)
    try:
        _keep(path, data)
    except OSError as error:
        get_logger().warning("data cache: cannot write %s: %s; continuing without it", path.parent, error)
    return data


def _download(filesystem: Any, name: str, file: File, start: int, stop: int) -> bytes:
    def attempt() -> bytes:
        data = filesystem.cat_file(name, start=start, end=stop)
        if len(data) != stop - start:  # a connection that was closed early
            raise ConnectionError(f"{len(data)} bytes instead of {stop - start}")
        return data

    try:
        return retrying(attempt)
    except FileNotFoundError as error:
        raise DataError(f"{file.url} has disappeared since it was listed: {error}") from error
    except Exception as error:
        where = f"bytes {start} to {stop} of {file.url}"
        raise DataError(f"{where} could not be read: {type(error).__name__}: {error}") from error


def _keep(path: Path, data: bytes) -> None:
    global _written
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    _written += 1
    if _written % _BETWEEN_SWEEPS == 1:
        _remove_oldest(path.parent)


def _remove_oldest(cache: Path) -> None:
    limit = float(os.environ.get("HVDKIT_DATA_CACHE_GB") or _DEFAULT_GB) * 1e9
    found = []
    for path in cache.iterdir():
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    excess = sum(size for _, size, _ in found) - limit
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            excess -= size
