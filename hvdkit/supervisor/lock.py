"""Lock a ``logdir``, local or in a store, for one run at a time; a second run gets an error that names the first."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import json
import os
import secrets
import shlex
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import psutil

from hvdkit.checkpoint import stores
from hvdkit.checkpoint.files import RunPath, checkpoint_errors
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import CheckpointError, CorruptCheckpointError, describe, printable
from hvdkit.watchdog.reporter import reporter

if TYPE_CHECKING:
    from upath import UPath

Holder: TypeAlias = dict[str, Any]  # the run that holds a lock, as JSON: host, pid, user, command and since
NAME = ".lock"
_TAKEN = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_WAIT_FOR_HOLDER_SECONDS = 1.0
_HOLDER_BYTES = 2**14  # of the file that are read; a holder has a few hundred
BEAT_SECONDS = 5.0
"""Seconds between two writes of a lock in a store, which show that its holder lives."""
LEASE_SECONDS = 20.0
"""How long a lock in a store must stay unchanged until another run takes it."""
_LOOK_SECONDS = 1.0
_SHOWN = 200  # characters of the holder's command, and of its other texts
# struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, process. Zeros mean the whole file.
_FLOCK = struct.Struct("hh4xqqi4x")

# Folders that this process has locked, by device and inode, as a folder can have many paths.
_HELD: dict[tuple[int, int], LogdirLock] = {}


class LogdirLock:
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
            raise _held_by_this_process(self._logdir)
        self._holder = describe_this_run()
        self._file = self._open_and_lock()
        self._key = key
        _HELD[key] = self

    def verify(self) -> None:
        """Raise CheckpointError if another run holds the lock, or held it meanwhile; reacquire it if it was lost."""
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
            raise CheckpointError(_refusal(self._logdir, holder, "has taken"))

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
                raise CheckpointError(_refusal(self._logdir, _read_holder(file))) from None
            if error.errno not in _NO_LOCKS:
                raise CheckpointError(f"{self._path}: cannot be locked ({error.strerror})") from error
            if self._key is None:  # only the first time
                get_logger().warning(
                    "%s: its file system has no locks (%s); make sure that no second run writes there",
                    self._logdir,
                    error.strerror,
                )


class StoreLock:
    """The same in an object store, which has no locks that end with their process.

    The lock is an object that its holder writes again and again. A new one is written on the condition that there is
    none (S3: ``If-None-Match``; GCS: a generation of 0). A run that finds a lock looks whether it changes: within
    :data:`BEAT_SECONDS`, its holder lives, and this run ends. After :data:`LEASE_SECONDS` without a change the holder
    is dead, and its lock is replaced; that of a process of this host which has ended, at once. No clock of one host is
    compared with that of another.

    Two runs that find the same dead lock may both replace it; :meth:`verify`, which is called before each checkpoint is
    complete, ends one of them. A store without conditional writes cannot exclude that two runs begin at the same
    moment, which a warning says.
    """

    def __init__(self, logdir: UPath) -> None:
        self._logdir = logdir
        self._path = logdir / NAME
        self._holder: Holder = {}
        self._ended = threading.Event()
        self._process: int | None = None
        self._writing = threading.Lock()  # so that the lock is not written again while it is released

    def acquire(self) -> None:
        """Acquire the lock, waiting only to see whether its holder lives. Not reentrant.

        Raises:
            CheckpointError: another run, or another session of this process, holds it, or ``logdir`` is not writable.
        """
        self._holder = {**describe_this_run(), "id": secrets.token_hex(8)}
        if not stores.has_conditional_writes(self._logdir):
            message = "%s: its store has no conditional writes; make sure that no second run begins there"
            get_logger().warning(message, self._logdir)
        while self._read() is not None or not self._create():  # some stores write in spite of the condition
            self._wait_for_end_of_holder()
            stores.remove([self._path])
        self._process = os.getpid()
        self._ended.clear()
        reporter().start_helper("hvdkit-lock", self._beat)

    def verify(self) -> None:
        """Raise CheckpointError if another run holds the lock, or held it meanwhile; write a missing one again."""
        if self._process is None:
            raise CheckpointError(f"{self._path}: this run has released the lock and can no longer write")
        found = self._read()
        if found is None and self._create():
            return
        if found is None:
            found = self._read() or b""
        if not self._is_own(found):
            raise CheckpointError(_refusal(self._logdir, _holder_of(found), "has taken"))

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held, or in a forked child of the holder."""
        process = self._process
        self._process = None
        self._ended.set()
        if process == os.getpid():
            with contextlib.suppress(CheckpointError), self._writing:
                if self._is_own(self._read() or b""):
                    stores.remove([self._path])

    def _text(self, beat: int) -> bytes:
        return json.dumps({**self._holder, "beat": beat}).encode()

    def _create(self) -> bool:
        try:
            stores.write_bytes(self._path, self._text(0), create=True)
        except FileExistsError:
            return self._is_own(self._read() or b"")  # an answer may be lost, and the request repeated
        return True

    def _read(self) -> bytes | None:
        try:
            return stores.read_bounded(self._path, _HOLDER_BYTES)
        except CorruptCheckpointError:
            return None

    def _is_own(self, data: bytes) -> bool:
        return self._holder["id"].encode() in data

    def _wait_for_end_of_holder(self) -> None:
        """Return when the holder is dead or has released the lock. Raises CheckpointError if it lives."""
        first = self._read()
        if first is None:
            return
        holder = _holder_of(first)
        if holder is not None and holder["host"] == socket.gethostname():
            if holder["pid"] == os.getpid():
                raise _held_by_this_process(self._logdir)
            if not psutil.pid_exists(int(holder["pid"])):
                return
        get_logger().info("%s is locked; looking for up to %g s whether its run lives", self._logdir, LEASE_SECONDS)
        until = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            found = self._read()
            if found is None:
                return
            if found != first:
                raise CheckpointError(_refusal(self._logdir, _holder_of(found)))

    def _beat(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_SECONDS):
            beat += 1
            # If the store is down, verify reports it if it stays so.
            with contextlib.suppress(CheckpointError), self._writing:
                if not self._ended.is_set() and self._is_own(self._read() or b""):
                    stores.write_bytes(self._path, self._text(beat))


def lock_of(logdir: RunPath) -> LogdirLock | StoreLock:
    """Return the lock of a local folder or of one in a store."""
    return LogdirLock(logdir) if isinstance(logdir, Path) else StoreLock(logdir)


def _held_by_this_process(logdir: RunPath) -> CheckpointError:
    """Return the error about a second session of this process with one logdir."""
    got = f"{logdir}, which this process (pid {os.getpid()}) already writes to"
    remedy = "exit the first Supervisor before entering the second, or pass it another logdir"
    return CheckpointError(describe("logdir", got, "one Supervisor at a time for a logdir", remedy))


def _refusal(logdir: RunPath, holder: Mapping[str, object] | None, verb: str = "writes to") -> str:
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
            if (holder := _holder_of(os.pread(file, _HOLDER_BYTES, 0))) is not None:
                return holder
        if time.monotonic() > until:
            return None
        time.sleep(0.02)


def _holder_of(data: bytes) -> Holder | None:
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
