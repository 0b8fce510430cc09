"""Calls of functions that ask a server: they are repeated, with growing random pauses, while an error may pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Retries:
    """How a call is repeated. Needs the package tenacity, of the extra ``files``.

    Attributes:
        may_pass: returns True for an error after which the call is repeated.
        seconds: no attempt begins later than this after the first one.
        first_pause: the longest first pause, in seconds; each further one may be twice as long.
        longest_pause: the longest of all pauses, in seconds.
        attempts: the most attempts, or None.
        sleep: waits for a pause; it may raise.
        before: called before each attempt; it may raise.
        before_pause: called with the seconds since the first attempt.
    """

    may_pass: Callable[[BaseException], bool]
    seconds: float
    first_pause: float
    longest_pause: float
    attempts: int | None = None
    sleep: Callable[[float], None] = time.sleep
    before: Callable[[], None] = lambda: None
    before_pause: Callable[[float], None] = lambda seconds: None

    def call(self, function: Callable[..., T], *arguments: object, **options: object) -> T:
        """Call a function until it returns; return its result.

        Raises:
            Exception: the error of the last attempt.

        Example:
            >>> again = Retries(lambda error: isinstance(error, OSError), 60, 0.1, 20)
            >>> again.call(int, "12")
            12
        """
        import tenacity

        stops: list[tenacity.stop.stop_base] = [tenacity.stop_after_delay(self.seconds)]
        if self.attempts is not None:
            stops.append(tenacity.stop_after_attempt(self.attempts))
        attempts = tenacity.Retrying(
            stop=tenacity.stop_any(*stops),
            wait=tenacity.wait_random_exponential(self.first_pause, self.longest_pause),
            retry=tenacity.retry_if_exception(self.may_pass),
            sleep=self.sleep,
            before=lambda _: self.before(),
            before_sleep=lambda state: self.before_pause(state.seconds_since_start or 0.0),
            reraise=True,
        )
        return attempts(function, *arguments, **options)
