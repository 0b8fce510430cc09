"""Lock a local ``logdir`` for one run at a time; a second run gets an error that names the first."""

from __future__ import annotations

import abc
import contextlib
import errno
import fcntl
import getpass
import json
import os
import shlex
import socket
import struct
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from hvdkit.checkpoint.files import RunPath, checkpoint_errors
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import CheckpointError, describe, printable

Holder: TypeAlias = dict[str, Any]  # the run that holds a lock, as JSON: host, pid, user, command and since
NAME = ".lock"
_TAKEN = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_WAIT_FOR_HOLDER_SECONDS = 1.0
HOLDER_BYTES = 2**14
"""Bytes of the file that are read; a holder has a few hundred."""
_SHOWN = 200  # characters of the holder's command, and of its other texts
# struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, process. Zeros mean the whole file.
_FLOCK = struct.Struct("hh4xqqi4x")

_Lock = TypeVar("_Lock", bound="HeldLock")

# Folders that this process has locked, by device and inode, as a folder can have many paths.
_HELD: dict[tuple[int, int], LogdirLock] = {}


class HeldLock(abc.ABC):
    """A lock that is held in a ``with`` block."""

    def __enter__(self: _Lock) -> _Lock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @abc.abstractmethod
    def acquire(self) -> None:
        """Acquire the lock. Raises CheckpointError if that is not possible."""

    @abc.abstractmethod
    def verify(self) -> None:
        """Check that the lock is held. Raises CheckpointError if it is not."""

    @abc.abstractmethod
    def release(self) -> None:
        """Release the lock, if it is held."""


class LogdirLock(HeldLock):
    """Exclusive lock for writing to ``logdir``, held until :meth:`release` or the end of the process.

    Uses an open-file-description lock on ``logdir/.lock`` (Linux 3.15 and later; see fcntl(2)). The kernel releases it
    even if the process is killed. Unlike a POSIX record lock, it is not lost if the same process opens and closes the
    file, e.g. to copy ``logdir``. Forked children close their copy of the descriptor. Systems without such locks use a
    record lock. The file describes the holder as JSON. It is never removed or replaced: a process waiting for it would
    otherwise lock a file that is invisible to other processes.

    On NFS, clients forward the lock to the server, which excludes runs on other hosts. A server that restarts, or does
    not hear from the client for its lease time, may grant the lock to another run, so call :meth:`verify` before each
    checkpoint is renamed to its final name. On file systems without locks, a warning is logged.

    Args:
        logdir: the folder; created if missing.

    Raises:
        CheckpointError: another run or another lock of this process holds ``logdir``, or it is not writable.

    Example::

        with LogdirLock(Path("/data/run1")):
            train()
    """

    def __init__(self, logdir: str | Path) -> None:
        self._logdir = Path(logdir)
        self._path = self._logdir / NAME
        self._key: tuple[int, int] | None = None
        self._file = -1
        self._holder: Holder = {}

    def acquire(self) -> None:
        """Acquire the lock without waiting. Not reentrant.

        Raises:
            CheckpointError: another run or another lock of this process holds it, or ``logdir`` is not writable.
        """
        with checkpoint_errors(self._logdir, "written"):
            self._logdir.mkdir(parents=True, exist_ok=True)
            status = self._logdir.stat()
        key = status.st_dev, status.st_ino
        if key in _HELD:
            raise held_by_this_process(self._logdir)
        self._holder = describe_this_run()
        self._file = self._open_and_lock()
        self._key = key
        _HELD[key] = self

    def verify(self) -> None:
        """Check that this run still holds the lock; reacquire it if it was lost but not held by another run.

        Raises:
            CheckpointError: another run holds ``logdir`` or held it in the meantime.
        """
        if self._key is None:
            raise CheckpointError(f"{self._path}: this run has released the lock and can no longer write")
        held = os.fstat(self._file)
        try:
            current = self._path.stat()
        except FileNotFoundError:  # removed by hand
            current = held
            replacement = self._open_and_lock()
            os.close(self._file)
            self._file = replacement
        if (current.st_dev, current.st_ino) != (held.st_dev, held.st_ino):  # replaced by a copy or by another run
            with checkpoint_errors(self._path, "written"):
                replacement = os.open(self._path, os.O_RDWR)
            os.close(self._file)
            self._file = replacement
        self._lock(self._file)  # succeeds immediately if already held
        holder = _read_holder(self._file)
        if holder != self._holder:
            raise CheckpointError(refusal(self._logdir, holder, "has taken"))

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held, or in a forked child of the holder."""
        key = self._key
        file = self._file
        self._key = None
        self._file = -1
        if key is None:
            return
        _HELD.pop(key, None)
        with contextlib.suppress(OSError):
            if _read_holder(file) == self._holder:
                os.ftruncate(file, 0)
        os.close(file)

    def _open_and_lock(self) -> int:
        """Open and lock the file, write the holder to it, and return the descriptor."""
        with checkpoint_errors(self._path, "written"):
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock(file)
            with checkpoint_errors(self._path, "written"):
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(self._holder).encode(), 0)
        except BaseException:
            os.close(file)
            raise
        return file

    def _lock(self, file: int) -> None:
        try:
            _lock_file(file)
        except OSError as error:
            if error.errno in _TAKEN:
                raise CheckpointError(refusal(self._logdir, _read_holder(file))) from None
            if error.errno not in _NO_LOCKS:
                raise CheckpointError(f"{self._path}: cannot be locked ({error.strerror})") from error
            if self._key is None:  # only the first time
                get_logger().warning(
                    "%s: its file system has no locks (%s); make sure that no second run writes there",
                    self._logdir,
                    error.strerror,
                )


def held_by_this_process(logdir: RunPath) -> CheckpointError:
    """Return the error about a second session of this process with one logdir."""
    got = f"{logdir}, which this process (pid {os.getpid()}) already writes to"
    remedy = "exit the first Supervisor before entering the second, or pass it another logdir"
    return CheckpointError(describe("logdir", got, "one Supervisor at a time for a logdir", remedy))


def refusal(logdir: RunPath, holder: Mapping[str, object] | None, verb: str = "writes to") -> str:
    """Return the message about a logdir that another run, ``holder``, uses."""
    if holder is None:
        description = "another run, which has not identified itself"
        stop = f"find it with: lslocks | grep {NAME}"
    else:
        shown = {name: printable(value)[:_SHOWN] for name, value in holder.items()}
        description = "pid {pid} on {host}, user {user}, since {since}: {command}".format(**shown)
        stop = f"stop it (kill {shown['pid']} on {shown['host']})"
    got = f"{logdir}, which another run {verb} ({description})"
    remedy = f"wait until that run ends, {stop}, or pass another logdir"
    return describe("logdir", got, "a logdir that no other run uses", remedy)


def describe_this_run() -> Holder:
    """Return the description of this run for the error message of a second run."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, in a container
        user = str(os.getuid())
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": user,
        # Omit arguments, which may contain secrets: other users may be able to read this file.
        "command": shlex.join([Path(sys.executable).name, sys.argv[0] or "-"]),
        "since": datetime.now(timezone.utc).astimezone().isoformat(timespec="seconds"),
    }


def _lock_file(file: int) -> None:
    """Lock a file with an open-file-description lock, or with a record lock if that is not supported."""
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is not None:
        try:
            fcntl.fcntl(file, command, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # not supported by an old kernel or file system
                raise
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _read_holder(file: int) -> Holder | None:
    """Read the holder of the lock, waiting up to a second as a run locks before it writes; None if missing."""
    until = time.monotonic() + _WAIT_FOR_HOLDER_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if (holder := holder_of(os.pread(file, HOLDER_BYTES, 0))) is not None:
                return holder
        if time.monotonic() > until:
            return None
        time.sleep(0.02)


def holder_of(data: bytes) -> Holder | None:
    """Return the holder that a lock describes, or None if it does not."""
    try:
        found = json.loads(data)
        holder = {name: found[name] for name in ("host", "pid", "user", "command", "since")}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return holder if type(holder["pid"]) is int and 0 < holder["pid"] < 2**31 else None


def _close_all_in_child() -> None:
    """In a forked child: close the inherited descriptors, which would keep the locks."""
    for lock in _HELD.values():
        os.close(lock._file)
        lock._key = None
        lock._file = -1
    _HELD.clear()


os.register_at_fork(after_in_child=_close_all_in_child)
