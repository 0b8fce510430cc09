"""The time after which a run of the tests begins no further one: ``--limit`` of tests/run.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

UNTIL = "HVDKIT_TEST_UNTIL"
"""Seconds since the epoch; not set, there is no limit."""


def is_over() -> bool:
    """Return True if the time of this run is over."""
    return time.time() > float(os.environ.get(UNTIL, "inf"))


IS_OVER = pytest.StashKey[Callable[[], bool]]()
"""The function that a session of pytest asks, if not :func:`is_over`: all ranks need the same answer."""
