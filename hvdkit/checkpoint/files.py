"""Atomic file writes: sync, rename, and errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hvdkit.errors import CheckpointError

_REMEDIES = {
    errno.ENOSPC: "free space there, or save elsewhere",
    errno.EDQUOT: "raise the quota, or save elsewhere",
    errno.EROFS: "the file system is read-only: save elsewhere",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ENOENT: "something removed it",
    errno.EEXIST: "a file of that name is there: give a folder",
    errno.ENOTDIR: "a part of the path is a file: give a folder",
}


@contextlib.contextmanager
def checkpoint_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file and the remedy; ``action`` is "written" or "read"."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "look at the disk")
        raise CheckpointError(f"{path}: cannot be {action} ({error.strerror or error}); {remedy}") from error


def sync_folder(path: Path) -> None:
    """Sync a folder to disk. A new or renamed file is durable only after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a small file atomically and durably.

    Args:
        path: the file.
        text: its content.
        sync: also sync the parent folder. Pass False if another process may move the folder as soon as the file exists.

    Raises:
        CheckpointError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with checkpoint_errors(path, "written"):
        try:
            with temporary.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        if sync:
            sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder and its contents; ignore files that are missing or cannot be removed."""
    shutil.rmtree(path, ignore_errors=True)
