"""The offsets of a file's records, found once and cached.

The cache is a file next to the data, or in the user's cache if that folder cannot be written. It has a JSON line of
4096 bytes with what it belongs to and a checksum, then the offsets: uint64 ``[records + 1]``, little-endian. It belongs
to a file of a certain size, time and beginning, middle and end: tools that copy files may keep the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import platformdirs
import xxhash

from hvdkit.cluster.logs import get_logger
from hvdkit.data.files.filesystems import open_regular
from hvdkit.data.files.listing import File
from hvdkit.data.files.storage import OpenFile, opened
from hvdkit.machine.replacing import replaced

_VERSION = 2
_HEADER_BYTES = _SAMPLE_BYTES = 4096
_LARGE_CACHE = 2**18  # bytes; each that is mapped keeps a file open
_COMPARED_AT_ONCE = 2**20
_ABANDONED = 3600  # seconds after which a temporary file is that of a process that was killed
_TEMPORARY = re.compile(r"(\..+\.[0-9a-f]{8}|[0-9a-f]{16})\.offsets\.[0-9a-f]{8}")
Scan = Callable[[OpenFile], np.ndarray]
_reported: set[str] = set()
_lock = threading.Lock()


def offsets_of(file: File, kind: str, scan: Scan) -> np.ndarray:
    """Return the offsets of a file's records and its end, uint64 ``[records + 1]``; mapped from the cache if large.

    ``kind``, the format and its options, determines the offsets; ``scan`` finds them if no valid cache exists.
    """
    paths = _cache_paths(file, kind)
    header = {"version": _VERSION, "kind": kind, "size": file.size, "file_version": file.version}
    with opened(file) as open_file:
        if open_file.path is not None:  # the version of a remote file is a tag of its content
            header["samples"] = _samples(open_file)
        for path in paths:
            if (found := _read(path, header, file.size)) is not None:
                return found
        offsets = np.asarray(scan(open_file), "<u8")
    problems = {}
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, header, offsets)
            return _loaded(path)
        except OSError as error:
            problems[path.parent] = error.strerror
    _warn(", ".join(f"{folder}: {problem}" for folder, problem in problems.items()))
    return offsets


def _warn(problems: str) -> None:
    """Warn the user, once for each folder of data, that offsets cannot be kept. Several threads may call this."""
    with _lock:
        if problems in _reported:
            return
        _reported.add(problems)
    get_logger().warning("data: cannot keep the offsets of records, so each start finds them again: %s", problems)


def _samples(file: OpenFile) -> str:
    """Return a digest of the beginning, the middle and the end of a file."""
    size = file.file.size
    part = min(size, _SAMPLE_BYTES)
    starts = 0, (size - part) // 2, size - part
    return xxhash.xxh3_64_hexdigest(b"".join(file.read(start, part) for start in starts))


def _cache_paths(file: File, kind: str) -> list[Path]:
    name = xxhash.xxh3_64_hexdigest(os.fsencode(f"{file.url} {kind}"))
    user = Path(platformdirs.user_cache_dir("hvdkit"), "offsets", f"{name}.offsets")
    if "://" in file.url:
        return [user]
    data = Path(file.url)
    return [data.parent / f".{data.name}.{xxhash.xxh3_64_hexdigest(kind.encode())[:8]}.offsets", user]


def _write(path: Path, header: dict[str, object], offsets: np.ndarray) -> None:
    checksum = xxhash.xxh3_64_hexdigest(offsets.data)
    line = json.dumps({**header, "checksum": checksum}).encode().ljust(_HEADER_BYTES - 1) + b"\n"
    _sweep(path.parent)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    # Not durable: after a crash, the checksum shows what is missing.
    with replaced(path, temporary), temporary.open("xb") as file:
        file.write(line)
        offsets.tofile(file)


@cache
def _sweep(folder: Path) -> None:
    """Remove what killed processes left in a folder, once."""
    for path in filter(lambda path: _TEMPORARY.fullmatch(path.name), folder.glob("*.offsets.*")):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED:
                path.unlink()


def _loaded(path: Path) -> np.ndarray:
    if path.stat().st_size > _LARGE_CACHE:
        return np.memmap(path, "<u8", "r", _HEADER_BYTES)
    return np.fromfile(path, "<u8", offset=_HEADER_BYTES)


def _read(path: Path, header: dict[str, object], size: int) -> np.ndarray | None:
    """Return the offsets in a cache file, or None if it does not exist or belongs to another version of the data."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > _HEADER_BYTES + 8 * (size + 2):  # a record has at least one byte
                return None
            found = json.loads(file.read(_HEADER_BYTES))
        checksum = found.pop("checksum")
        if found != header:
            return None
        offsets = _loaded(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    is_valid = checksum == xxhash.xxh3_64_hexdigest(offsets.data) and _are_offsets(offsets, size)
    return offsets if is_valid else None


def _are_offsets(offsets: np.ndarray, size: int) -> bool:
    """Return whether these are ascending numbers up to the size of a file."""
    parts = (offsets[i : i + _COMPARED_AT_ONCE + 1] for i in range(0, len(offsets), _COMPARED_AT_ONCE))
    return not len(offsets) or (bool(offsets[-1] <= size) and all((part[1:] >= part[:-1]).all() for part in parts))
