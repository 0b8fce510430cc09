"""Threads that read the following batches while the step runs; the end of the program does not wait for them."""

from __future__ import annotations

import concurrent.futures.thread
import itertools
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from hvdkit import cluster
from hvdkit.errors import describe
from hvdkit.machine.cores import available_cores

T = TypeVar("T")
U = TypeVar("U")

_MOST_THREADS = 8
_AHEAD_PER_THREAD = 2  # batches read ahead of the step
_UNUSED = 64  # a block is dropped when so many batches have not used it
_PAUSE_STEP = 0.2  # seconds between two checks of a pause


def threads() -> int:
    """Return the number of threads that read files: the ranks of a host share its cores."""
    ranks = cluster.local_size() if cluster.is_initialized() else 1
    return max(2, min(_MOST_THREADS, available_cores() // ranks))


def in_threads(function: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Return the results of ``function`` for all items, computed by several threads."""
    executor = ThreadPoolExecutor(threads(), "hvdkit-scan")
    try:
        return [*executor.map(function, items)]
    finally:  # an error, or Ctrl-C, does not wait for the other items
        executor.shutdown(wait=False, cancel_futures=True)


def require_running() -> None:
    """Raise InterruptedError if the main thread has ended its program: Python waits for the threads that read."""
    if concurrent.futures.thread._shutdown:  # has no public name in Python 3.11 to 3.14
        raise InterruptedError("the program ends")


def pause(seconds: float) -> None:
    """Sleep; raise InterruptedError if the program ends before."""
    deadline = time.monotonic() + seconds
    while (rest := deadline - time.monotonic()) > 0:
        require_running()
        time.sleep(min(rest, _PAUSE_STEP))


def in_order(function: Callable[[T], U], items: Iterable[T], at_end: Callable[[], None]) -> Iterator[U]:
    """Yield ``function(item)`` for all items, in their order, computed ahead by several threads.

    An exception is raised at its item. Threads end when the iterator is closed or deleted. Then ``at_end`` is called,
    and again after each call of ``function`` that still runs. ``function`` must call :func:`require_running`, so that
    the threads end with the program, too.
    """
    workers = threads()
    process = os.getpid()
    executor = ThreadPoolExecutor(workers, "hvdkit-read")
    pending: deque[Future[U]] = deque()

    try:
        remaining = iter(items)
        while True:
            for item in itertools.islice(remaining, workers * _AHEAD_PER_THREAD + 1 - len(pending)):
                pending.append(executor.submit(function, item))
            if not pending:
                return
            if os.getpid() != process:
                got = "a process forked within an epoch"
                expected = "the process that began the epoch"
                remedy = "start processes with the method 'spawn', and create the data in them"
                raise RuntimeError(describe("GlobalBatches", got, expected, remedy))
            result = pending[0].result()
            pending.popleft()
            yield result
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        at_end()
        for future in pending:
            future.add_done_callback(lambda _: at_end())


class BlockCache(Generic[T]):
    """Blocks that were read, until their rows have been used. If ``keep``, none is dropped.

    A block that several threads need is read once. It is dropped when all of its rows have been used. Blocks of which
    other ranks use some rows are dropped when the last 64 batches have been without them.
    """

    def __init__(self, load: Callable[[int], T], block_rows: np.ndarray, *, keep: bool = False):
        self._load = load
        self._block_rows = block_rows
        self._keep = keep
        self._blocks: OrderedDict[int, _KeptBlock[T]] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()
        self._batches = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def next_batch(self) -> None:
        """Drop the blocks that have not been used for a while."""
        with self._lock:
            self._batches += not self._keep
            while self._blocks and next(iter(self._blocks.values())).last_batch < self._batches - _UNUSED:
                self._blocks.popitem(last=False)

    def get(self, block: int, rows: int) -> T:
        """Return a block to use ``rows`` of its rows, and read it if necessary."""
        with self._lock:
            found = self._blocks.pop(block, None)
            kept: _KeptBlock[T] = found or _KeptBlock()
            kept.last_batch = self._batches
            kept.used = kept.used + rows
            if self._keep or kept.used < self._block_rows[block]:
                self._blocks[block] = kept
        if found is None:
            try:
                kept.content.set_result(self._load(block))
            except BaseException as error:
                with self._lock:
                    self._blocks.pop(block, None)
                kept.content.set_exception(error)
        return kept.content.result()


@dataclass
class _KeptBlock(Generic[T]):
    content: Future[T] = field(default_factory=Future)
    last_batch: int = 0
    used: int = 0
