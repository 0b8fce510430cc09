"""Atomic file writes: sync, rename, and errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hvdkit.errors import CheckpointError

_REMEDIES = {
    errno.ENOSPC: "free space there, or save elsewhere",
    errno.EDQUOT: "raise the quota, or save elsewhere",
    errno.EROFS: "the file system is read-only: save elsewhere",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ENOENT: "something removed it",
    errno.EEXIST: "a file of that name exists: pass a folder",
    errno.ENOTDIR: "a part of the path is a file: pass a folder",
}


@contextlib.contextmanager
def checkpoint_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file and the remedy; ``action`` is "written" or "read"."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk")
        raise CheckpointError(f"{path}: cannot be {action} ({error.strerror or error}); {remedy}") from error


def sync(path: Path) -> None:
    """Sync a file or a folder to disk. A new or renamed file is durable only after its folder is synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: Path, mode: str) -> Iterator[IO[Any]]:
    """Yield a temporary file to write, which is synced and renamed to ``path`` at the end, or removed on an error.

    Raises:
        CheckpointError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with checkpoint_errors(path, "written"):
        try:
            with temporary.open(mode) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically and durably. Raises CheckpointError if it cannot be written."""
    with atomic_file(path, "w") as file:
        file.write(text)
    with checkpoint_errors(path, "written"):
        sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder and its contents; ignore files that are missing or cannot be removed."""
    shutil.rmtree(path, ignore_errors=True)
