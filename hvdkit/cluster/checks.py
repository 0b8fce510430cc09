"""``HVDKIT_CHECK=1``: the collectives that ranks trace into their graphs, compared on rank 0 through the watchdog.

Ranks match collectives by name. One that traces another list than the others would wait for them for ever: here the
first difference is found when the graphs are made, before any of them runs into it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

# A rank that has traced more than another, for so long, is not just ahead of it.
PATIENCE = 10.0


def enabled() -> bool:
    """Return True where the person asked for the comparison."""
    return os.environ.get("HVDKIT_CHECK") == "1"


class Traced(NamedTuple):
    """A collective in a graph.

    Attributes:
        what: collective, name, dtypes and shapes; the same on all ranks.
        line: the person's source line that led to it.
    """

    what: str
    line: str


class Difference(NamedTuple):
    """The first collective that is not the same."""

    rank: int
    cause: str


@dataclass
class Trace:
    """What one rank traced into one function, in order, and when it last added to it."""

    collectives: list[Traced]
    changed: float


class Checks:
    """What all ranks have traced. A function that is traced again, for another shape, is compared by itself."""

    def __init__(self) -> None:
        self._traces: dict[tuple[str, int], dict[int, Trace]] = defaultdict(dict)

    def add(self, rank: int, message: dict[str, Any]) -> Difference | None:
        """Take a rank's next collective; return the difference to what rank 0, or the lowest rank, has there."""
        key = (message["function"], message["trace"])
        trace = self._traces[key].setdefault(rank, Trace([], 0.0))
        trace.collectives.append(Traced(message["what"], message["line"]))
        trace.changed = time.monotonic()
        place = len(trace.collectives) - 1
        there = {r: t.collectives[place] for r, t in sorted(self._traces[key].items()) if len(t.collectives) > place}
        first = next(iter(there))
        for other, collective in there.items():
            if collective.what != there[first].what:
                return _difference(message["function"], place, other, collective, first, there[first])
        return None

    def overdue(self, now: float) -> Difference | None:
        """Return the first collective that some rank has, and another lacks, in a function that both have traced."""
        for (function, _), traces in self._traces.items():
            ranks = sorted(traces)
            longest = max(ranks, key=lambda rank: len(traces[rank].collectives))
            shortest = min(ranks, key=lambda rank: len(traces[rank].collectives))
            place, latest = len(traces[shortest].collectives), max(trace.changed for trace in traces.values())
            if len(traces[longest].collectives) > place and now - latest > PATIENCE:
                extra = traces[longest].collectives[place]
                return Difference(
                    longest if shortest == ranks[0] else shortest,
                    f"CollectiveMismatchError: collective {place + 1} of {function} is {extra.what} ({extra.line}) on "
                    f"rank {longest}, and missing on rank {shortest}; build the same graph on every rank",
                )
        return None


def _difference(function: str, place: int, rank: int, mine: Traced, first: int, theirs: Traced) -> Difference:
    return Difference(
        rank,
        f"CollectiveMismatchError: collective {place + 1} of {function} is {mine.what} ({mine.line}), but on rank "
        f"{first} {theirs.what} ({theirs.line}); build the same graph on every rank",
    )
