"""The offsets of a file's records, found once and cached.

The cache is a file next to the data, or in the user's cache if that folder cannot be written. It has a JSON line of
4096 bytes with what it belongs to and a checksum, then the offsets: uint64 ``[records + 1]``, little-endian.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
import platformdirs
import xxhash

from hvdkit.data.files.listing import File
from hvdkit.data.files.storage import OpenFile, opened

_VERSION = 1
_HEADER_BYTES = 4096
Scan = Callable[[OpenFile], np.ndarray]


def offsets_of(file: File, kind: str, scan: Scan) -> np.ndarray:
    """Return the offsets of a file's records and its end, uint64 ``[records + 1]``, mapped from the cache.

    Args:
        kind: The format and its options, which determine the offsets.
        scan: Finds the offsets if no valid cache exists.
    """
    paths = _cache_paths(file, kind)
    header = {"version": _VERSION, "kind": kind, "size": file.size, "file_version": file.version}
    for path in paths:
        if (found := _read(path, header)) is not None:
            return found
    with opened(file) as open_file:
        offsets = np.asarray(scan(open_file), "<u8")
    for path in paths:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, header, offsets)
            return np.memmap(path, "<u8", "r", _HEADER_BYTES)
    return offsets


def _cache_paths(file: File, kind: str) -> list[Path]:
    name = xxhash.xxh3_64_hexdigest(f"{file.url} {kind}".encode())
    user = Path(platformdirs.user_cache_dir("hvdkit"), "offsets", f"{name}.offsets")
    if "://" in file.url:
        return [user]
    data = Path(file.url)
    return [data.parent / f".{data.name}.{xxhash.xxh3_64_hexdigest(kind.encode())[:8]}.offsets", user]


def _write(path: Path, header: dict[str, object], offsets: np.ndarray) -> None:
    checksum = xxhash.xxh3_64_hexdigest(offsets.data)
    line = json.dumps({**header, "checksum": checksum}).encode().ljust(_HEADER_BYTES - 1) + b"\n"
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(line)
            offsets.tofile(file)
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, header: dict[str, object]) -> np.ndarray | None:
    """Return the offsets in a cache file, or None if it does not exist or belongs to another version of the data."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_HEADER_BYTES))
        checksum = found.pop("checksum")
        offsets = np.memmap(path, "<u8", "r", _HEADER_BYTES)
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    is_valid = found == header and checksum == xxhash.xxh3_64_hexdigest(offsets.data)
    return offsets if is_valid else None
