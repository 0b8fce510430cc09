"""The end of the program, which must not wait for files that are read ahead."""

from __future__ import annotations

import concurrent.futures.thread
import time

_STEP = 0.2  # seconds between two checks


def require_running() -> None:
    """Raise InterruptedError if the main thread has ended its program: Python waits for the threads that read."""
    if concurrent.futures.thread._shutdown:  # has no public name in Python 3.11 to 3.14
        raise InterruptedError("the program ends")


def pause(seconds: float) -> None:
    """Sleep; raise InterruptedError if the program ends before."""
    deadline = time.monotonic() + seconds
    while (rest := deadline - time.monotonic()) > 0:
        require_running()
        time.sleep(min(rest, _STEP))
