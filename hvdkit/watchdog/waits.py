"""Detects deadlocked ranks. Pure.

Sentinels report the eager collective, or those of a graph, in which a rank has waited for some seconds.

Ranks match the collectives of graphs by name, and eager collectives by order. If ranks build or run different graphs,
e.g. with a branch that only one of them takes, every rank ends up waiting for a collective that another rank never
enters. This is found within seconds, with the source lines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from hvdkit.watchdog.flight_recorder import CollectiveRecord

SETTLED = 2.0
"""Seconds without a change after which no message of a rank about its collectives can still be in transit."""

SETTLED_IN_GRAPH = 6.0
"""The same for collectives of graphs: a rank looks at them every two seconds, and reports as often."""


class Difference(NamedTuple):
    """The first rank that differs from the others, and the difference."""

    rank: int
    cause: str


class Waits:
    """The collectives in which ranks currently wait, by key.

    Args:
        heard: returns when a rank's last message arrived. Messages of one rank arrive in order, so a rank that has
            not reported the end of a collective was still waiting in it at that time.
    """

    def __init__(self, heard: Callable[[int], float]) -> None:
        self._heard = heard
        self._pending: dict[int, dict[str, CollectiveRecord]] = defaultdict(dict)
        self._changed_at: dict[int, float] = {}  # when each rank last reported about its collectives
        self._compared_at = 0.0

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
        if now - self._compared_at < SETTLED or not self._pending:
            return None
        self._compared_at = now
        unchanged = {rank: now - self._changed_at[rank] for rank in self._pending.keys() & ranks}
        settled = {rank for rank, seconds in unchanged.items() if seconds >= self._settle_seconds(rank)}
        return self._mismatch(settled) or self._deadlock(ranks, settled)

    def _settle_seconds(self, rank: int) -> float:
        is_in_graph = any(not one.is_eager for one in self._pending[rank].values())
        return SETTLED_IN_GRAPH if is_in_graph else SETTLED

    def _mismatch(self, ranks: Set[int]) -> Difference | None:
        """Return the first of ``ranks`` whose collective differs from that with the same key on most other ranks."""
        by_key: dict[str, dict[int, CollectiveRecord]] = defaultdict(dict)
        for rank in sorted(ranks):
            for key, record in self._pending[rank].items():
                if not record.is_eager:
                    by_key[key][rank] = record
        return next(filter(None, map(_difference, by_key.values())), None)

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


def _difference(records: Mapping[int, CollectiveRecord]) -> Difference | None:
    """Return the first rank that is in another collective than the majority, or None.

    The majority is assumed to be right; on a tie, the group with the lowest rank.
    """
    values = {rank: record.what for rank, record in records.items()}
    usual = Counter(values.values()).most_common(1)[0][0]
    odd = next((rank for rank in values if values[rank] != usual), None)
    if odd is None:
        return None
    other = next(rank for rank in values if values[rank] == usual)
    cause = f"is in {records[odd]}, but rank {other} in {records[other]}"
    return Difference(odd, f"CollectiveMismatchError: {cause}; build the same graph on every rank")
