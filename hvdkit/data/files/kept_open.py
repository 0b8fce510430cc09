"""Files that stay open between reads, up to a number.

Opening a file can cost more than reading from it: Parquet has its footer to parse, ArrayRecord its index.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol, TypeVar, cast

MOST_OPEN = 64
"""Number of files that stay open while no thread reads them."""
CHECK_SECONDS = 1.0
"""A file that is used is checked for changes again after this time."""


class Closable(Protocol):
    """What opening a file returns."""

    def close(self) -> None:
        """Close the file."""


C = TypeVar("C", bound=Closable)
_idle: OrderedDict[Hashable, list[tuple[Closable, float]]] = OrderedDict()  # with the times of their last checks
_lock = threading.Lock()
_is_closing = False  # the idle files are to be closed


@contextlib.contextmanager
def kept_open(key: Hashable, make: Callable[[], C], check: Callable[[], None]) -> Iterator[C]:
    """Lend an open file to one thread at a time; keep it open for the next.

    Args:
        key: What it is for.
        make: Opens it.
        check: Raises if the file is not as it was. Called before it is opened, and once a second while it is used.
    """
    opened, checked = _take(key)
    try:
        if opened is None or time.monotonic() - checked > CHECK_SECONDS:
            check()
            checked = time.monotonic()
        if opened is None:
            opened = make()
        yield cast("C", opened)  # what was made for this key before
    except BaseException:
        if opened is not None:
            with contextlib.suppress(Exception):  # the first error counts
                opened.close()
        raise
    for unused in _give_back(key, opened, checked):
        with contextlib.suppress(Exception):  # what was wrong with it was raised by its reads
            unused.close()


def _take(key: Hashable) -> tuple[Closable | None, float]:
    with _lock:
        idle = _idle.pop(key, [])
        found = idle.pop() if idle else (None, 0.0)
        if idle:
            _idle[key] = idle
    _close_if_asked()
    return found


def _give_back(key: Hashable, opened: Closable, checked: float) -> list[Closable]:
    """Keep an open file; return those that are too many, which were not used for the longest time."""
    with _lock:
        _idle[key] = [*_idle.pop(key, []), (opened, checked)]
        excess: list[Closable] = []
        while sum(map(len, _idle.values())) > MOST_OPEN:
            _, oldest = _idle.popitem(last=False)
            excess += [each for each, _ in oldest]
    _close_if_asked()
    return excess


def close_idle() -> None:
    """Close the files that no thread is reading: a file that is removed takes space on its disk until it is closed.

    Python may collect an abandoned epoch, which calls this, at any time, also while this thread holds the lock. So this
    never waits for the lock: the thread that holds it closes the files afterwards.
    """
    global _is_closing
    _is_closing = True
    _close_if_asked()


def _close_if_asked() -> None:
    """Close the idle files if this was asked for and no thread holds the lock."""
    global _is_closing
    while _is_closing and _lock.acquire(blocking=False):
        try:
            _is_closing = False
            idle = [each for files in _idle.values() for each, _ in files]
            _idle.clear()
        finally:
            _lock.release()
        for each in idle:
            with contextlib.suppress(Exception):
                each.close()
