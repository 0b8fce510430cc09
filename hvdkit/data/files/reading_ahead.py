"""Threads that read the following batches while the step runs."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from hvdkit import cluster
from hvdkit.data.files.program_end import require_running
from hvdkit.errors import describe
from hvdkit.machine.cores import available_cores

T = TypeVar("T")
U = TypeVar("U")

_MOST_THREADS = 8
_AHEAD_PER_THREAD = 2  # batches read ahead of the step
_UNUSED = 64  # a block is dropped when so many batches have not used it


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


def in_order(function: Callable[[T], U], items: Iterable[T], at_end: Callable[[], None] = lambda: None) -> Iterator[U]:
    """Yield ``function(item)`` for all items, in their order, computed ahead by several threads.

    An exception is raised at its item. Threads end when the iterator is closed or deleted, or the program ends.

    Args:
        at_end: Called when the iterator has ended, and again after each call of ``function`` that still runs then.

    Raises:
        RuntimeError: The process has been forked; threads exist in its parent only.
    """
    workers = threads()
    process = os.getpid()
    executor = ThreadPoolExecutor(workers, "hvdkit-read")
    pending: deque[Future[U]] = deque()

    def call(item: T) -> U:
        require_running()
        return function(item)

    try:
        remaining = iter(items)
        while True:
            for item in itertools.islice(remaining, workers * _AHEAD_PER_THREAD + 1 - len(pending)):
                pending.append(executor.submit(call, item))
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
    """Blocks that were read, until their rows have been used.

    A block that several threads need is read once. It is dropped when all of its rows have been used. Blocks of which
    other ranks use some rows are dropped when the last 64 batches have been without them.

    Args:
        load: Reads a block.
        block_rows: int64 ``[blocks]``: the number of rows of each.
        keep: Drop no block.
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
