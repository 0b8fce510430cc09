"""Atomic file writes: sync, rename; reads of regular files only; and errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hvdkit.errors import CheckpointError, CorruptCheckpointError, describe
from hvdkit.machine.replacing import replaced, sync

_REMEDIES = {
    errno.ENOSPC: "free space there, or save elsewhere",
    errno.EDQUOT: "raise the quota, or save elsewhere",
    errno.EROFS: "the file system is read-only: save elsewhere",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ENOENT: "something removed it",
    errno.EEXIST: "a file of that name exists: pass a folder",
    errno.ENOTDIR: "a part of the path is a file: pass a folder",
    errno.ENAMETOOLONG: "use shorter names",
}
_URL = re.compile(r"[a-zA-Z][\w+.-]+:/")  # Path makes gs:/ of gs://
# Errors of this process or host, not of a file.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def local_path(path: str | Path, argument: str) -> Path:
    """Return a path of a file system.

    Raises:
        ValueError: it is a URL, of which a local folder such as ``gs:`` would be made.
    """
    if _URL.match(str(path)):
        expected = "a folder of a file system that all hosts share"
        remedy = "mount the store on every host (gcsfuse, mountpoint-s3, blobfuse), or copy the folder after the run"
        raise ValueError(describe(argument, str(path), expected, remedy))
    return Path(path)


@contextlib.contextmanager
def checkpoint_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file and the remedy; ``action`` is "written" or "read"."""
    try:
        yield
    except OSError as error:
        remedy = remedy_of(error.errno)
        raise CheckpointError(f"{path}: cannot be {action} ({error.strerror or error}); {remedy}") from error


def remedy_of(code: int | None) -> str:
    """Return what the user can do about the ``errno`` of a failed read or write."""
    return _REMEDIES.get(code or 0, "check the disk")


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while a checkpoint's file is read into a CorruptCheckpointError that names the file.

    A disk that reports an error has lost the file just like one that returns other bytes, so an older checkpoint can be
    used. A shortage of memory or file descriptors is a plain CheckpointError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); raise the limit (ulimit -a)") from error
        if error.errno == errno.ENOENT:
            reason = "is a link to a file that does not exist" if path.is_symlink() else "missing"
        else:
            reason = f"cannot be read ({error.strerror or error})"
        raise CorruptCheckpointError(f"{path}: {reason}") from error


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor; links are followed.

    To open a FIFO waits for a writer, and a device has no end.

    Raises:
        CorruptCheckpointError: it is missing, is something else than a regular file, or cannot be read.
    """
    with read_errors(path):
        _check_regular(path, path.stat())  # some devices do something when they are opened
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_regular(path, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CorruptCheckpointError(f"{path}: is {kind}, expected a regular file")


def regular_size(path: Path) -> int:
    """Return the length of a regular file in bytes. Raises as :func:`open_regular` does."""
    with read_errors(path):
        status = path.stat()
    _check_regular(path, status)
    return status.st_size


def read_bounded(path: Path, most: int) -> bytes:
    """Return the contents of a small regular file.

    Raises:
        CorruptCheckpointError: it has more than ``most`` bytes, or as :func:`open_regular`.
    """
    with os.fdopen(open_regular(path), "rb") as file, read_errors(path):
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CorruptCheckpointError(f"{path}: has {size} bytes, expected at most {most}")
        return file.read(size)


@contextlib.contextmanager
def atomic_file(path: Path, mode: str) -> Iterator[IO[Any]]:
    """Yield a temporary file to write, which is synced and renamed to ``path`` at the end, or removed on an error.

    Raises:
        CheckpointError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with (
        checkpoint_errors(path, "written"),
        replaced(path, temporary, durable=True),
        temporary.open(mode, encoding=None if "b" in mode else "utf-8") as file,
    ):
        yield file


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically and durably. Raises CheckpointError if it cannot be written."""
    with atomic_file(path, "w") as file:
        file.write(text)
    with checkpoint_errors(path, "written"):
        sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder and its contents; ignore files that are missing or cannot be removed."""
    shutil.rmtree(path, ignore_errors=True)
