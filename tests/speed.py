"""How long tests wait, and how much slower this machine is than the one on which the limits were written.

Only tests whose subject is time compare seconds, and they multiply their limits by :func:`slowdown`. All others wait
``WAIT`` seconds for what they started, which says that something hangs on any machine, and nothing more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

# The runner's --stall: seconds without a test that ends, after which it ends a launch as hung.
STALL = float(os.environ.get("HVDKIT_TEST_STALL", "600"))
# Seconds that a test waits for what it started. Less than STALL, so that the test itself fails and says for what.
WAIT = STALL / 2
VARIABLE = "HVDKIT_TEST_SLOWDOWN"

# A process that works in Python, then starts TensorFlow, and says how many seconds the first part took.
_WORK = """
import time
began = time.perf_counter()
sum(number * number % 7 for number in range(3_000_000))
print(time.perf_counter() - began, flush=True)
import tensorflow
"""
# Two processes at once, as in most tests: seconds on two idle cores of the machine on which the limits were written.
_PROCESSES, _WORK_SECONDS, _START_SECONDS = 2, 0.4, 5.0


def slowdown() -> float:
    """Return how many times slower this machine is, under its present load; at least 1.

    The runner measures it and passes it on, so that launches and ranks that run at once use the same; without the
    runner, tests/cluster measures it. 1 if it was not measured.
    """
    return float(os.environ.get(VARIABLE, "1"))


def scaled(seconds: float) -> str:
    """Return seconds times the slowdown, as a setting in the environment."""
    return f"{seconds * slowdown():.2f}"


def measure() -> float:
    """Return the larger slowdown of two: of work in Python, and of the start of TensorFlow; at least 1."""
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
    """Wait until ``condition()`` is true; fail with what ``said()`` returns if it is not after ``WAIT`` seconds."""
    until = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < until, said()
        time.sleep(0.02)
