"""Detects deadlocked ranks, and ranks that run different graphs. Pure.

By default, sentinels report the eager collective, or those of a graph, in which a rank has waited for some seconds.
This is sufficient to find ranks that wait for each other in different collectives. With ``HVDKIT_CHECK=1``, sentinels
report every collective.

Ranks match the collectives of graphs by name, and eager collectives by order. If ranks build or run different graphs,
e.g. with another dtype or a branch that only one of them takes, every rank ends up waiting for a collective that
another rank never enters. Or collectives match by accident and produce wrong numbers, e.g. because two of them are
swapped or one is inserted. Both cases are found within seconds, with the source lines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from hvdkit.watchdog.flight_recorder import CollectiveRecord

SETTLED = 2.0
"""Seconds without a change after which no message of a rank about its collectives can still be in transit."""

_SETTLED_IN_GRAPH = 6.0  # a rank looks at the collectives of its graphs every two seconds, and reports as often


class Difference(NamedTuple):
    """The first rank that differs from the others, and the difference."""

    rank: int
    cause: str


class Waits:
    """The collectives in which ranks currently wait, by key.

    Args:
        heard: returns when a rank's last message arrived. Messages of one rank arrive in order, so a rank that has
            not reported the end of a collective was still waiting in it at that time.
        is_complete: whether ranks report all collectives (``HVDKIT_CHECK=1``).
    """

    def __init__(self, heard: Callable[[int], float], *, is_complete: bool = True) -> None:
        self._heard = heard
        self.is_complete = is_complete
        self._pending: dict[int, dict[str, CollectiveRecord]] = defaultdict(dict)
        self._latest: dict[int, dict[str, CollectiveRecord]] = defaultdict(dict)  # by key, whether still pending or not
        self._lines: dict[str, set[str]] = defaultdict(set)  # source lines of each key, on any rank
        self._ambiguous: set[str] = set()  # keys with several lines
        self._swapped: Difference | None = None
        self._changed_at: dict[int, float] = {}  # when each rank last reported about its collectives
        self._compared_at = 0.0

    def begin(self, rank: int, record: CollectiveRecord, now: float) -> None:
        """Record that a rank waits in a collective."""
        if record.participants == ():  # unknown: too many to record
            return
        key = record.key
        self._pending[rank][key] = record
        self._changed_at[rank] = now
        if not record.is_eager and self._swapped is None:
            self._latest[rank][key] = record
            lines = self._lines[key]
            lines.add(record.line)
            if len(lines) > 1:
                self._ambiguous.add(key)
            if self._ambiguous:  # otherwise all ranks agree, without comparing them one by one
                self._swapped = self._seek_swapped(rank, key, record.line)

    def end(self, rank: int, key: str, now: float) -> None:
        """Record that a rank has left a collective."""
        self._pending[rank].pop(key, None)
        self._changed_at[rank] = now
        if not self._pending[rank]:
            del self._pending[rank]

    def replace(self, rank: int, records: Sequence[CollectiveRecord], now: float) -> None:
        """Replace a rank's records by the collectives in which it has waited for a while."""
        before = self._pending.get(rank, {})
        if [(one.key, one.start) for one in before.values()] == [(one.key, one.start) for one in records]:
            return
        self._pending.pop(rank, None)
        if all(record.participants != () for record in records):
            for record in records:
                self._pending[rank][record.key] = record
                self._changed_at[rank] = now

    def difference(self, ranks: Set[int], now: float) -> Difference | None:
        """Return why ``ranks`` cannot continue, once all messages about it must have arrived, or None.

        Every :data:`SETTLED` seconds, the ranks that have sent no message during that time are compared.
        """
        if self._swapped is not None or now - self._compared_at < SETTLED or not self._pending:
            return self._swapped
        self._compared_at = now
        unchanged = {rank: now - self._changed_at[rank] for rank in self._pending.keys() & ranks}
        settled = {rank for rank, seconds in unchanged.items() if seconds >= self._settle_seconds(rank)}
        return self.mismatch(settled) or self._deadlock(ranks, settled)

    def _settle_seconds(self, rank: int) -> float:
        is_sampled = not self.is_complete and any(not one.is_eager for one in self._pending[rank].values())
        return _SETTLED_IN_GRAPH if is_sampled else SETTLED

    def _seek_swapped(self, rank: int, key: str, line: str) -> Difference | None:
        """Return the difference if a line has different keys on two ranks, and one of the keys has another line there.

        A key with different lines is not sufficient: ranks may call a function, or ``fit``, from different lines.
        """
        lines = {name: record.line for name, record in self._latest[rank].items()}
        is_repeated = any(name != key and one == line for name, one in lines.items())
        for other in self._latest.keys() - {rank}:
            other_lines = {name: record.line for name, record in self._latest[other].items()}
            for name, one in other_lines.items():
                if name != key and one == line and lines.get(name, line) != line:
                    return self._compare(name)
            other_line = other_lines.get(key, line)
            is_swapped = other_line in lines.values() or (line in other_lines.values() and not is_repeated)
            if other_line != line and is_swapped:
                return self._compare(key)
        return None

    def _compare(self, key: str) -> Difference | None:
        records = {rank: latest[key] for rank, latest in sorted(self._latest.items()) if key in latest}
        return _difference(records, lambda record: record.line)

    def mismatch(self, ranks: Set[int] | None = None) -> Difference | None:
        """Return the first of ``ranks`` whose collective differs from that with the same key on most other ranks."""
        by_key: dict[str, dict[int, CollectiveRecord]] = defaultdict(dict)
        for rank in sorted(self._pending if ranks is None else ranks):
            for key, record in self._pending[rank].items():
                if not record.is_eager:
                    by_key[key][rank] = record
        differences = (_difference(records, lambda record: record.what) for records in by_key.values())
        return next(filter(None, differences), None)

    def _deadlock(self, ranks: Set[int], settled: Set[int]) -> Difference | None:
        """Return which rank waits in which collective, if some of the ``settled`` ranks are deadlocked.

        A rank may have continued since its report. So each of these ranks must have sent a message after the last one
        began to wait, which shows that all of them were waiting at that moment.
        """
        stuck = self._waiting_for_each_other(ranks, settled)
        if not stuck or min(map(self._heard, stuck)) <= max(self._changed_at[rank] for rank in stuck):
            return None
        keys = {rank: next(iter(self._pending[rank])) for rank in sorted(stuck)}
        usual = Counter(keys.values()).most_common(1)[0][0]
        other = next(rank for rank, key in keys.items() if key == usual)
        awaited = self._pending[other][usual]
        missing = (rank for rank in awaited.participants or ranks if rank in stuck and usual not in self._pending[rank])
        odd = min(missing, default=other)
        cause = f"waits in {self._pending[odd][keys[odd]]}, but rank {other} in {awaited}, and neither can continue"
        return Difference(odd, f"CollectiveMismatchError: {cause}; make every rank enter the same collectives")

    def _waiting_for_each_other(self, ranks: Set[int], settled: Set[int]) -> set[int]:
        """Return the ranks that each wait only in collectives that another rank of this set has not entered."""
        missing: dict[str, set[int]] = {}  # the ranks that have not entered each collective
        for rank in settled:
            for key, record in self._pending[rank].items():
                missing.setdefault(key, set(record.participants or ranks)).discard(rank)
        stuck = set(settled)
        size = -1
        while len(stuck) != size:
            size = len(stuck)
            stuck = {rank for rank in stuck if all(missing[key] & stuck for key in self._pending[rank])}
        return stuck


def _difference(records: Mapping[int, CollectiveRecord], get: Callable[[CollectiveRecord], str]) -> Difference | None:
    """Return the first rank for whose record ``get`` returns another value than for the majority's, or None.

    The majority is assumed to be right; on a tie, the group with the lowest rank.
    """
    values = {rank: get(record) for rank, record in records.items()}
    usual = Counter(values.values()).most_common(1)[0][0]
    odd = next((rank for rank in values if values[rank] != usual), None)
    if odd is None:
        return None
    other = next(rank for rank in values if values[rank] == usual)
    cause = f"is in {records[odd]}, but rank {other} in {records[other]}"
    return Difference(odd, f"CollectiveMismatchError: {cause}; build the same graph on every rank")
