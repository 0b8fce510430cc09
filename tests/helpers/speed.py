"""Timeouts of tests, and the slowdown of this machine relative to the one on which the limits were written.

Only tests whose subject is time compare seconds, and they multiply their limits by :func:`slowdown`. All others
wait up to ``WAIT`` seconds for the processes that they start; exceeding it means a hang on any machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

# The runner's --stall: seconds without a finished test after which a launch is ended as hung.
STALL = float(os.environ.get("HVDKIT_TEST_STALL", "600"))
# Seconds a test waits for what it started. Less than STALL, so that the test itself fails with an explanation.
WAIT = STALL / 2
VARIABLE = "HVDKIT_TEST_SLOWDOWN"

# A process that works in Python, starts TensorFlow, and prints the seconds of the first part.
_WORK = """
import time
began = time.perf_counter()
sum(number * number % 7 for number in range(3_000_000))
print(time.perf_counter() - began, flush=True)
import tensorflow
"""
# Two processes at once, as in most tests; seconds on two idle cores of the machine on which limits were written.
_PROCESSES, _WORK_SECONDS, _START_SECONDS = 2, 0.4, 5.0


def slowdown() -> float:
    """Return how many times slower than that machine this one is under its present load, at least 1.

    The runner measures it once and passes it on, so that all launches and ranks use the same value; without the
    runner, tests/jobs measures it. Returns 1 if it was not measured.
    """
    return float(os.environ.get(VARIABLE, "1"))


def scaled(seconds: float) -> str:
    """Return seconds times the slowdown, as the value of an environment variable."""
    return f"{seconds * slowdown():.2f}"


def measure() -> float:
    """Return the larger of two slowdowns, of Python code and of TensorFlow's start; at least 1."""
    started = time.perf_counter()
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    processes = [
        subprocess.Popen([sys.executable, "-c", _WORK], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
        for _ in range(_PROCESSES)
    ]
    worked = max(float(process.communicate()[0]) for process in processes)
    ended = time.perf_counter() - started
    return max(1.0, worked / _WORK_SECONDS, ended / _START_SECONDS)


def wait_until(condition: Callable[[], object], said: Callable[[], str] = str) -> None:
    """Wait until ``condition()`` is true; after ``WAIT`` seconds fail with the text that ``said()`` returns."""
    until = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < until, said()
        time.sleep(0.02)
