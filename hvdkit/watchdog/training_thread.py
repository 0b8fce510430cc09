"""What the training thread does, seen from another thread: whether it runs a graph, what it handles, its stack."""

from __future__ import annotations

import faulthandler
import os
import sys

from hvdkit.watchdog.events import Stacks
from hvdkit.watchdog.flight_recorder import FlightRecorder, memory_file

# TensorFlow's functions that run a graph or an eager op; a rank that waits in a graph's collective blocks in one.
_IN_GRAPH = {"quick_execute", "execute_with_cancellation"}


class TrainingThread:
    """The thread that trains. ``ident`` is its identifier in Python."""

    def __init__(self, ident: int) -> None:
        self._ident = ident

    @property
    def is_in_graph(self) -> bool:
        """True while it runs a graph or an eager op of TensorFlow."""
        frame = sys._current_frames().get(self._ident)
        return frame is not None and frame.f_code.co_name in _IN_GRAPH

    @property
    def exception(self) -> BaseException | None:
        """The exception that it is handling, or None."""
        error: object = sys._current_exceptions().get(self._ident)
        error = error[1] if isinstance(error, tuple) else error  # a tuple before Python 3.12
        return error if isinstance(error, BaseException) else None

    def stacks(self, recorder: FlightRecorder, busy_reason: str | None, doing: str) -> Stacks:
        """Return the last activity of this rank, and the Python stacks of all its threads.

        ``doing`` is what the rank does while others wait for it; "" if unknown.
        """
        with os.fdopen(memory_file(), "w+b") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read().decode(errors="replace")
        step = "" if recorder.step is None else f"at step {recorder.step}"
        busy = f"busy: {busy_reason}" if busy_reason else ""
        last = recorder.describe()
        where = ""
        frame = sys._current_frames().get(self._ident)
        if frame is not None:
            where = f"in {frame.f_code.co_name}, {frame.f_code.co_filename}:{frame.f_lineno}"
        doing = f"in {doing}" if doing else ""
        header = f"{', '.join(filter(None, [step, busy, doing, last]))}; its stacks, most recent call first:"
        where = "; ".join(filter(None, [busy, doing, where, last]))
        text = "\n".join([header, *stacks.splitlines()])
        return Stacks(text=text, where=where, waiting=recorder.waiting or self.is_in_graph)
