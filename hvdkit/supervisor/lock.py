"""One run at a time writes to a ``logdir``: the second one is refused, and told who the first is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import json
import os
import shlex
import socket
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from hvdkit.checkpoint.files import naming_file
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import CheckpointError, describe

NAME = ".lock"
_TAKEN = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_WAIT_FOR_HOLDER_SECONDS = 1.0

# Folders locked by this process: POSIX gives a process the same lock twice, and takes both away when it closes
# either. By device and inode, for one folder has many paths; with the process id, for a forked child inherits this
# table though not the locks.
_HELD: dict[tuple[int, int], int] = {}


class LogdirLock:
    """The right to write to ``logdir``, held until :meth:`release` or the end of the process, however it ends.

    A POSIX record lock on ``logdir/.lock``. Such locks belong to the process: the kernel frees them when it is
    killed, a child that outlives it does not hold them (as it would those of ``flock``), and NFS has them across
    hosts. The file describes its holder as JSON; it is never removed nor replaced, for whoever waits at it would
    hold the lock of a file that nobody else sees.

    No code of this process may open and close ``logdir/.lock`` meanwhile: closing it frees the lock.

    Args:
        logdir: the folder; made if it is missing.

    Raises:
        CheckpointError: another run, or another lock of this process, holds ``logdir``, or it cannot be written.

    Example::

        with LogdirLock(Path("/data/run1")):
            train()
    """

    def __init__(self, logdir: str | Path) -> None:
        self._logdir = Path(logdir)
        self._path = self._logdir / NAME
        self._key: tuple[int, int] | None = None
        self._file = -1

    def __enter__(self) -> LogdirLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, or raise at once if it is taken. Its holder may not take it again.

        Raises:
            CheckpointError: another run, or another lock of this process, holds it, or ``logdir`` cannot be written.
        """
        with naming_file(self._logdir, "written"):
            self._logdir.mkdir(parents=True, exist_ok=True)
            status = self._logdir.stat()
        key = status.st_dev, status.st_ino
        if _HELD.get(key) == os.getpid():
            raise CheckpointError(
                describe(
                    "logdir",
                    f"{self._logdir}, which this process (pid {os.getpid()}) writes to already",
                    "one Supervisor at a time for a logdir",
                    "leave the first before you enter the second, or give it another logdir",
                )
            )
        with naming_file(self._path, "written"):
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock(file)
            with naming_file(self._path, "written"):
                _write(file, json.dumps(_myself()))
        except BaseException:
            os.close(file)
            raise
        self._file, self._key = file, key
        _HELD[key] = os.getpid()

    def release(self) -> None:
        """Give the lock back; without it, or in a forked child of its holder, this does nothing."""
        key, file = self._key, self._file
        self._key, self._file = None, -1
        if key is None or _HELD.get(key) != os.getpid():
            return
        del _HELD[key]
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
        os.close(file)

    def _lock(self, file: int) -> None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise CheckpointError(self._refusal(_holder(file))) from None
            if error.errno not in _NO_LOCKS:
                raise CheckpointError(f"{self._path}: cannot be locked ({error.strerror})") from error
            get_logger().warning(
                "%s: its file system has no locks (%s); see to it yourself that no second run writes there",
                self._logdir, error.strerror,
            )  # fmt: skip

    def _refusal(self, holder: dict[str, Any] | None) -> str:
        if holder is None:
            who, stop = "another run, which has not said who it is", f"find it with: lslocks | grep {NAME}"
        else:
            who = "pid {pid} on {host}, user {user}, since {since}: {command}".format(**holder)
            stop = f"stop it (kill {holder['pid']} on {holder['host']})"
        return describe(
            "logdir",
            f"{self._logdir}, which another run writes to ({who})",
            "a logdir of this run's own",
            f"wait until that run ends, {stop}, or pass another logdir",
        )


def _myself() -> dict[str, Any]:
    """What a second run says about this one."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        user = str(os.getuid())
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": user,
        "command": shlex.join(sys.orig_argv),
        "since": datetime.now(timezone.utc).astimezone().isoformat(timespec="seconds"),
    }


def _write(file: int, text: str) -> None:
    """Replace the text of an open file in place."""
    data = text.encode()
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)


def _holder(file: int) -> dict[str, Any] | None:
    """Read who holds the lock, or None where it does not say so: between locking and writing lies a moment."""
    until = time.monotonic() + _WAIT_FOR_HOLDER_SECONDS
    while True:
        try:
            holder = json.loads(os.pread(file, 1 << 20, 0))
            return {name: holder[name] for name in ("host", "pid", "user", "command", "since")}
        except (ValueError, TypeError, KeyError, OSError):
            if time.monotonic() > until:
                return None
        time.sleep(0.02)
