"""The sentinel's measurements of its rank, for metrics."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from hvdkit.watchdog.events import Measured
from hvdkit.watchdog.flight_recorder import CollectiveRecord, FlightReader

# How many of the last steps that were measured count, and how many records are read for one.
_STEPS = 9
_RECORDS = 256


class RankGauge:
    """Measures a rank from the records of its collectives and the notes of its training."""

    def __init__(self, reader: FlightReader) -> None:
        self._reader = reader
        self._measured = 0  # number of the last collective of the last step that was measured
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._nbytes = 0

    def take(self) -> Measured:
        """Return the measurements now."""
        self._measure_step()
        return Measured(
            **self._reader.notes()._asdict(),
            step_seconds=statistics.median(self._seconds) if self._seconds else None,
            step_bytes=self._nbytes,
        )

    def _measure_step(self) -> None:
        """Measure the last run of each collective of the rank's graphs: those of one step.

        The rank records the last runs every two seconds. If one of them had not ended then, its end is known only if it
        is still the last run at the next time, so nothing is measured before all last runs have ended.
        """
        last = self._reader.state().number
        records = self._reader.records(max(self._measured, last - _RECORDS))
        runs = {one.key: one for one in records if not one.is_eager}
        if not runs or any(one.end is None for one in runs.values()):
            return
        self._measured = last
        self._seconds.append(covered_seconds(list(runs.values())))
        self._nbytes = sum(one.nbytes for one in runs.values())


def covered_seconds(records: Sequence[CollectiveRecord]) -> float:
    """Return the seconds in which at least one of these collectives ran: buckets of gradients overlap."""
    total = 0.0
    until = 0.0
    for start, end in sorted((one.start, one.end or one.start) for one in records):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
