"""Files of a run, local or in a store: whole writes, reads of regular files only, and errors that name the file.

A local file is synced and renamed. The functions that take a :data:`RunPath` do the same for an object of a store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from hvdkit.checkpoint import stores
from hvdkit.errors import CheckpointError, CorruptCheckpointError, describe
from hvdkit.machine.replacing import replaced, sync

if TYPE_CHECKING:
    from upath import UPath

RunPath: TypeAlias = "Path | UPath"
"""A path of a run's files: local, or in a store. ``isinstance(path, Path)`` tells which."""

PROBE = ".shared-"
"""Start of the name of a file by which ranks see that they share a folder."""
_REMEDIES = {
    errno.ENOSPC: "free space there, or save elsewhere",
    errno.EDQUOT: "raise the quota, or save elsewhere",
    errno.EROFS: "the file system is read-only: save elsewhere",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ENOENT: "a folder of this path cannot be created here, or something removed it",
    errno.EEXIST: "a file of that name exists: pass a folder",
    errno.ENOTDIR: "a part of the path is a file: pass a folder",
    errno.ENAMETOOLONG: "use shorter names",
}
# Errors of this process or host, not of a file.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def run_path(path: str | RunPath, argument: str) -> RunPath:
    """Return a local path, or the path of a store for a URL or a ``UPath``, whose options for its client are kept."""
    return stores.open_store(path, argument) if stores.is_url(path) else local_path(path, argument)


def local_path(path: str | RunPath, argument: str) -> Path:
    """Return a path of a local file system; ``file:///tmp/a`` is ``/tmp/a``.

    The URL of a store is a ValueError: a local folder such as ``gs:`` would be made of it.
    """
    if stores.is_url(path):
        got = stores.without_secrets(str(path))
        raise ValueError(describe(argument, got, "a local folder", "write to one, and copy it to the store"))
    return Path(re.sub("^(?:file|local):(?://)?(?=/)", "", str(path)))


@contextlib.contextmanager
def checkpoint_errors(path: RunPath, action: str) -> Iterator[None]:
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
def read_errors(path: RunPath) -> Iterator[None]:
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
            is_link = isinstance(path, Path) and path.is_symlink()
            reason = "is a link to a file that does not exist" if is_link else "missing"
        else:
            reason = f"cannot be read ({error.strerror or error})"
        raise CorruptCheckpointError(f"{path}: {reason}") from error


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor; links are followed.

    A FIFO would wait for a writer, and a device has no end: they raise CorruptCheckpointError, as a file does that is
    missing or cannot be read.
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


def exists(path: RunPath) -> bool:
    """Return True if something has this name, also a dangling link; in a store, an object or a folder with one."""
    return os.path.lexists(path) if isinstance(path, Path) else stores.exists(path)


def is_folder(path: RunPath) -> bool:
    """Return True for a folder; in a store, for one with objects."""
    return path.is_dir() if isinstance(path, Path) else bool(stores.sizes(path))


def names_in(folder: RunPath) -> list[str]:
    """Return the names in a folder; a missing one of a store is empty. Raises OSError for a local one."""
    return [path.name for path in folder.iterdir()] if isinstance(folder, Path) else list(stores.sizes(folder))


def regular_size(path: Path) -> int:
    """Return the length of a regular file in bytes. Raises as :func:`open_regular` does."""
    with read_errors(path):
        status = path.stat()
    _check_regular(path, status)
    return status.st_size


def regular_sizes(folder: RunPath, expected: Mapping[str, int]) -> Iterator[tuple[str, int | None]]:
    """Yield name and length of each file, None if it is missing. Raises as :func:`open_regular` does.

    With the ``expected`` lengths, a store needs fewer requests.
    """
    if not isinstance(folder, Path):
        yield from stores.sizes_of(folder, expected)
        return
    for name in expected:
        yield name, regular_size(folder / name) if os.path.lexists(folder / name) else None


def read_bounded(path: RunPath, most: int) -> bytes:
    """Return the contents of a regular file of at most ``most`` bytes. Raises as :func:`open_regular` does."""
    if not isinstance(path, Path):
        return stores.read_bounded(path, most)
    with os.fdopen(open_regular(path), "rb") as file, read_errors(path):
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CorruptCheckpointError(f"{path}: has {size} bytes, expected at most {most}")
        return file.read(size)


class RegularFile:
    """A local regular file that is read by ranges. Raises as :func:`open_regular` does.

    Attributes:
        size: its length in bytes.
    """

    def __init__(self, path: Path):
        self._path = path
        self._descriptor = open_regular(path)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, view: memoryview, offset: int, until: int) -> int:
        """Fill the start of ``view`` with bytes from ``offset`` on; return their number, 0 at the end.

        The caller will read on up to byte ``until``, and may be given these bytes from memory.
        """
        with read_errors(self._path):
            return os.preadv(self._descriptor, [view], offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


ReadableFile: TypeAlias = RegularFile | stores.StoreFile


def open_readable(path: RunPath) -> ReadableFile:
    """Open a file to read ranges of it; see :class:`RegularFile` and :class:`~hvdkit.checkpoint.stores.StoreFile`."""
    return RegularFile(path) if isinstance(path, Path) else stores.StoreFile(path)


@contextlib.contextmanager
def atomic_file(path: Path, mode: str) -> Iterator[IO[Any]]:
    """Yield a temporary file to write, which is synced and renamed to ``path`` at the end, or removed on an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with (
        checkpoint_errors(path, "written"),
        replaced(path, temporary, durable=True),
        temporary.open(mode, encoding=None if "b" in mode else "utf-8") as file,
    ):
        yield file


def write_text(path: RunPath, text: str) -> None:
    """Write a small file atomically and durably. Raises CheckpointError if it cannot be written."""
    if not isinstance(path, Path):
        stores.write_bytes(path, text.encode())
        return
    with atomic_file(path, "w") as file:
        file.write(text)
    with checkpoint_errors(path, "written"):
        sync(path.parent)


def make_folder(path: RunPath) -> None:
    """Create a local folder and its parents. A store has folders as soon as they have objects."""
    if isinstance(path, Path):
        with checkpoint_errors(path, "written"):
            path.mkdir(parents=True, exist_ok=True)


def remove_file(path: RunPath) -> None:
    """Remove a file, if there is one. Raises OSError or CheckpointError if it cannot be removed."""
    if isinstance(path, Path):
        path.unlink(missing_ok=True)
    else:
        stores.remove([path])


def remove_folder(path: RunPath) -> None:
    """Remove a folder and its contents; ignore files that are missing or cannot be removed."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(CheckpointError):
        stores.remove_folder(path)
