"""Temporary folders, which do not fill the disk when their processes are killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

_NEW_SECONDS = 60.0
"""A folder that is younger may be one that its process has not locked yet."""


class ScratchFolder:
    """A temporary local folder, which only this user may read.

    Its process holds a lock of it. When a process is killed, its folder stays; the next process of the same user and
    host that makes a folder with this prefix removes it.

    Args:
        prefix: start of the folder's name, which the host's name follows: not every shared file system has locks that
            hold on all hosts.

    Attributes:
        path: the folder.

    Raises:
        OSError: the folder for temporary files cannot be written.

    Example:
        >>> scratch = ScratchFolder("hvdkit-save-")
        >>> scratch.path.is_dir()
        True
        >>> scratch.close()
        >>> scratch.path.exists()
        False
    """

    def __init__(self, prefix: str):
        of_host = f"{prefix}{socket.gethostname()}-"
        _remove_abandoned(of_host)
        self.path = Path(tempfile.mkdtemp(prefix=of_host))
        self._lock = _locked(self.path)

    def close(self) -> None:
        """Remove the folder and its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_abandoned(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process removes it
            status = path.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and status.st_mtime < time.time() - _NEW_SECONDS and (lock := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """Return a descriptor that holds the lock of ``folder``, or None: a process holds it, or it cannot be locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also on a file system without locks, where no folder is ever removed
        os.close(descriptor)
        return None
    return descriptor
