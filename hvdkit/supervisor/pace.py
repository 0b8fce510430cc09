"""At which steps the ranks talk to each other about saving and stopping: seldom enough to cost nothing.

Every rank must talk at the same steps, so that no rank can decide by its own clock alone. At one agreement the chief
says how many steps off the next one is; until then every rank only counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdkit.errors import describe

GROWTH = 4
"""The interval becomes at most so many times longer from one agreement to the next."""


class Pace:
    """Space agreements about ``seconds`` apart, in steps that are the same on every rank.

    The interval is ``seconds / mean step time``, measured since the last agreement. It grows at most fourfold at a
    time, so that a few quick steps (all of them cache hits) do not put off the next agreement for long. The first two
    steps both end in one: the first is slow, for it traces and compiles, and tells nothing about those after it.

    Steps that become k times slower put off the one agreement that is due by the factor k; the next is right again.

    Args:
        seconds: how long a wish to stop, or a save by the clock, may wait for its agreement.
        clock: returns seconds. A test passes its own.

    Raises:
        ValueError: ``seconds`` is not positive.

    Example::

        pace = Pace(seconds=1.0)
        for step, batch in enumerate(batches, start=1):
            train_step(batch)
            if pace.due(step):
                wish, interval = hk.broadcast_object((wishes(), pace.proposal(step)))
                pace.settle(step, interval)
    """

    def __init__(self, seconds: float = 1.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not seconds > 0:
            raise ValueError(describe("seconds", seconds, "a positive number", "pass e.g. 1.0"))
        self._seconds = seconds
        self._clock = clock
        self._next = 0  # whichever step comes first, an agreement is due at its end
        self._interval = 1
        self._settled: tuple[int, float] | None = None

    def due(self, step: int) -> bool:
        """Return whether the ranks agree after ``step``. The same on every rank that settled the same intervals."""
        return step >= self._next

    def proposal(self, step: int) -> int:
        """Return how many steps after ``step`` the next agreement should be, as this rank measured it; at least 1."""
        if self._settled is None or step <= self._settled[0]:
            return self._interval
        last, then = self._settled
        longest = GROWTH * self._interval
        elapsed = self._clock() - then
        # More steps than the longest interval fit into the time: also where the clock is too coarse to see any.
        if (step - last) * self._seconds >= longest * elapsed:
            return longest
        return max(1, int((step - last) * self._seconds / elapsed))

    def settle(self, step: int, interval: int) -> None:
        """Put the next agreement at ``step + interval``. Every rank passes the chief's proposal.

        While something is in flight whose end the ranks must agree on, pass 1: they meet again after the next step.

        Raises:
            ValueError: ``interval`` is less than 1.
        """
        if interval < 1:
            raise ValueError(describe("interval", interval, "at least 1 step", "pass the chief's proposal"))
        self._interval = interval
        self._next = step + interval
        self._settled = step, self._clock()
