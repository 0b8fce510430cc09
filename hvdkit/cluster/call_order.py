"""The order of this rank's eager collectives. Ranks match them by order, so one thread calls them, one at a time."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from hvdkit.errors import HvdkitError, describe

Result = TypeVar("Result")


class CallOrder:
    """Runs the exchanges of a rank in the order in which the user's thread called them.

    Only the first Python thread that calls an exchange may do so while it is alive. A TensorFlow thread, which runs a
    ``tf.py_function``, may call one while no other thread does. Asynchronous collectives run in a worker thread;
    synchronous ones wait until all collectives called before have ended.

    Attributes:
        completed: number of exchanges that this rank has completed, by the participating ranks; None for all ranks.
        final_counts: the same for each rank that has left the job.
    """

    def __init__(self) -> None:
        self.completed: Counter[tuple[int, ...] | None] = Counter()
        self.final_counts: dict[int, Counter[tuple[int, ...] | None]] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._worker_thread: threading.Thread | None = None
        self._pending: list[Future[Any]] = []

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Admit the calling thread to one exchange, which takes place inside the context.

        Raises:
            HvdkitError: another thread calls this rank's exchanges, or is in one.
        """
        thread = threading.current_thread()
        if thread is not self._worker_thread:
            self._admit(thread)
            if self._pending:
                wait(self._pending)  # their errors are raised when their results are requested
                self._pending = []
        if not self._lock.acquire(blocking=False):
            raise self._thread_error(thread, "another thread runs one")
        try:
            yield
        finally:
            self._lock.release()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run ``call``, which contains exchanges, in the worker thread, after all calls submitted before.

        Raises:
            HvdkitError: another thread calls this rank's exchanges.
        """
        self._admit(threading.current_thread())
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "hvdkit-collectives", initializer=self._begin_worker)
        future = self._worker.submit(call)
        self._pending = [pending for pending in self._pending if not pending.done()]
        self._pending.append(future)
        return future

    def _begin_worker(self) -> None:
        self._worker_thread = threading.current_thread()

    def _admit(self, thread: threading.Thread) -> None:
        if isinstance(thread, threading._DummyThread):  # a thread of TensorFlow
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = thread
        if self._thread is not thread:
            raise self._thread_error(thread, f"thread {self._thread.name!r} runs this rank's collectives")

    @staticmethod
    def _thread_error(thread: threading.Thread, why: str) -> HvdkitError:
        got = f"an eager collective in thread {thread.name!r}, while {why}"
        expected = "one thread, because ranks match eager collectives by their order"
        return HvdkitError(
            describe("thread", got, expected, "call it in that thread, or pass the value to it (queue.Queue)")
        )
