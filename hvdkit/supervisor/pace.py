"""Schedule the steps at which ranks agree on saving and stopping, rarely enough that the cost is negligible.

Ranks must agree at the same steps, so a rank cannot decide by its own clock. At each agreement, the chief announces the
number of steps until the next one; until then, every rank only counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdkit.errors import describe

GROWTH = 4
"""Maximum factor by which the interval grows from one agreement to the next."""


def crosses(every: int | None, before: int, now: int) -> bool:
    """Return True if a multiple of ``every`` lies in ``(before, now]``.

    Example:
        >>> crosses(100, 99, 100), crosses(100, 100, 199), crosses(None, 0, 500)
        (True, False, False)
    """
    return every is not None and now // every > before // every


class Pace:
    """Space agreements about ``seconds`` apart, in numbers of steps that are the same on every rank.

    The interval is ``seconds / mean step time``, measured since the last agreement. It grows at most fourfold each
    time, so that a few fast steps (e.g. cache hits) do not delay the next agreement for long. Ranks agree after both of
    the first two steps: the first is slow because it traces and compiles, so it does not predict later steps.

    If steps become k times slower, only the next agreement is late, by a factor of k.

    Args:
        seconds: how long a request to stop or a timed save may wait for an agreement.
        clock: returns seconds; replaced in tests.

    Attributes:
        next_step: the step after which an agreement is due; equal on all ranks that agreed on the same intervals.

    Raises:
        ValueError: ``seconds`` is not positive.
    """

    def __init__(self, seconds: float = 1.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not seconds > 0:
            raise ValueError(describe("seconds", seconds, "a positive number", "pass e.g. 1.0"))
        self._seconds = seconds
        self._clock = clock
        self.next_step = 0  # after the first step, whatever its number
        self._interval = 1
        self._settled: tuple[int, float] | None = None

    def proposal(self, step: int) -> int:
        """Return the number of steps from ``step`` to the next agreement, as measured by this rank; at least 1."""
        if self._settled is None or step <= self._settled[0]:
            return self._interval
        last, last_time = self._settled
        longest = GROWTH * self._interval
        elapsed = self._clock() - last_time
        # At least `longest` steps fit into the time; also when the clock is too coarse to measure the elapsed time.
        if (step - last) * self._seconds >= longest * elapsed:
            return longest
        return max(1, int((step - last) * self._seconds / elapsed))

    def settle(self, step: int, interval: int) -> None:
        """Set the next agreement to ``step + interval``. Every rank passes the chief's proposal.

        While an operation is in flight whose completion the ranks must agree on, pass 1 to agree again after one step.
        """
        if interval < 1:
            raise ValueError(describe("interval", interval, "at least 1 step", "pass the chief's proposal"))
        self._interval = interval
        self.next_step = step + interval
        self._settled = step, self._clock()
