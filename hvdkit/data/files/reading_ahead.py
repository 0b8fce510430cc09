"""Threads that read the following batches while the step runs."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from hvdkit import cluster
from hvdkit.machine.cores import available_cores

T = TypeVar("T")
U = TypeVar("U")

_MOST_THREADS = 8
_AHEAD_PER_THREAD = 2  # batches read ahead of the step
_UNUSED = 64  # a block is dropped when so many other requests have not used it


def threads() -> int:
    """Return the number of threads that read files: the ranks of a host share its cores."""
    ranks = cluster.local_size() if cluster.is_initialized() else 1
    return max(2, min(_MOST_THREADS, available_cores() // ranks))


def in_threads(function: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Return the results of ``function`` for all items, computed by several threads."""
    with ThreadPoolExecutor(threads(), "hvdkit-scan") as executor:
        return [*executor.map(function, items)]


def in_order(function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
    """Yield ``function(item)`` for all items, in their order, computed ahead by several threads.

    An exception is raised at its item. Threads end when the iterator is closed or deleted.
    """
    executor = ThreadPoolExecutor(threads(), "hvdkit-read")
    pending: deque[Future[U]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) > threads() * _AHEAD_PER_THREAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


class BlockCache:
    """Blocks that were read, until their rows have been used.

    A block that several threads need is read once. It is dropped when the last 64 requests have been for other blocks
    or for batches without it; the rows of a block are used within a window, by almost every batch.
    """

    def __init__(self, load: Callable[[int], Any]):
        self._load = load
        self._blocks: OrderedDict[int, tuple[Future[Any], int]] = OrderedDict()
        self._lock, self._batches = threading.Lock(), 0

    def next_batch(self) -> None:
        """Drop the blocks that have not been used for a while."""
        with self._lock:
            self._batches += 1
            while self._blocks and next(iter(self._blocks.values()))[1] < self._batches - _UNUSED:
                self._blocks.popitem(last=False)

    def get(self, block: int) -> Any:
        """Return a block, and read it if necessary."""
        with self._lock:
            found = self._blocks.pop(block, None)
            future = Future[Any]() if found is None else found[0]
            self._blocks[block] = future, self._batches
        if found is None:
            try:
                future.set_result(self._load(block))
            except BaseException as error:
                with self._lock:
                    self._blocks.pop(block, None)
                future.set_exception(error)
        return future.result()
