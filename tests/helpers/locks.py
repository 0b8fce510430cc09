"""Hold a lock of a logdir in a ``with`` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from hvdkit.supervisor.lock import LogdirLock, StoreLock

Lock = TypeVar("Lock", LogdirLock, StoreLock)


@contextlib.contextmanager
def held(lock: Lock) -> Iterator[Lock]:
    lock.acquire()
    try:
        yield lock
    finally:
        lock.release()
