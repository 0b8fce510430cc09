"""Lock a ``logdir`` in an object store, which has no locks that end with their process."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hvdkit.checkpoint import stores
from hvdkit.checkpoint.files import RunPath
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import CheckpointError, CorruptCheckpointError
from hvdkit.supervisor.lock import (
    HOLDER_BYTES,
    NAME,
    HeldLock,
    Holder,
    LogdirLock,
    describe_this_run,
    held_by_this_process,
    holder_of,
    refusal,
)

if TYPE_CHECKING:
    from upath import UPath

BEAT_SECONDS = 5.0
"""Seconds between two writes of the lock, which show that its holder lives."""
LEASE_SECONDS = 20.0
"""How long a lock must stay unchanged until another run takes it."""
_LOOK_SECONDS = 1.0


class StoreLock(HeldLock):
    """Exclusive lock for writing to a ``logdir`` in a store, as an object that its holder writes again and again.

    A new lock is written on the condition that there is none (S3: ``If-None-Match``; GCS: a generation of 0). A run
    that finds a lock looks whether it changes: within :data:`BEAT_SECONDS`, its holder lives, and this run ends. After
    :data:`LEASE_SECONDS` without a change the holder is dead, and its lock is replaced; that of a process of this host
    which has ended, at once. No clock of one host is compared with that of another.

    Two runs that find the same dead lock may both replace it; :meth:`verify`, which is called before each checkpoint is
    complete, ends one of them. A store without conditional writes cannot exclude that two runs begin at the same
    moment, which a warning says.

    Args:
        logdir: the folder.

    Raises:
        CheckpointError: another run, or another session of this process, holds ``logdir``, or it is not writable.

    Example::

        with StoreLock(UPath("s3://bucket/run")):
            train()
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
            CheckpointError: another run holds it, or ``logdir`` is not writable.
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
        threading.Thread(target=self._beat, name="hvdkit-lock", daemon=True).start()

    def verify(self) -> None:
        """Check that this run still holds the lock; write it again if someone has removed it.

        Raises:
            CheckpointError: another run holds ``logdir`` or held it in the meantime.
        """
        if self._process is None:
            raise CheckpointError(f"{self._path}: this run has released the lock and can no longer write")
        found = self._read()
        if found is None and self._create():
            return
        if found is None:
            found = self._read() or b""
        if not self._is_own(found):
            raise CheckpointError(refusal(self._logdir, holder_of(found), "has taken"))

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
            return stores.read_bounded(self._path, HOLDER_BYTES)
        except CorruptCheckpointError:
            return None

    def _is_own(self, data: bytes) -> bool:
        return self._holder["id"].encode() in data

    def _wait_for_end_of_holder(self) -> None:
        """Return when the holder is dead or has released the lock. Raises CheckpointError if it lives."""
        first = self._read()
        if first is None:
            return
        holder = holder_of(first)
        is_here = holder is not None and holder["host"] == socket.gethostname()
        if is_here and holder is not None and holder["pid"] == os.getpid():
            raise held_by_this_process(self._logdir)
        if is_here and holder is not None and not psutil.pid_exists(int(holder["pid"])):
            return
        get_logger().info("%s is locked; looking for up to %g s whether its run lives", self._logdir, LEASE_SECONDS)
        until = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            found = self._read()
            if found is None:
                return
            if found != first:
                raise CheckpointError(refusal(self._logdir, holder_of(found)))

    def _beat(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_SECONDS):
            beat += 1
            # If the store is down, verify reports it if it stays so.
            with contextlib.suppress(CheckpointError), self._writing:
                if not self._ended.is_set() and self._is_own(self._read() or b""):
                    stores.write_bytes(self._path, self._text(beat))


def lock_of(logdir: RunPath) -> HeldLock:
    """Return the lock of a local folder or of one in a store."""
    return LogdirLock(logdir) if isinstance(logdir, Path) else StoreLock(logdir)
