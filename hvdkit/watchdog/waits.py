"""Ranks that wait for each other, and ranks that run different graphs. Pure.

Sentinels report a collective called from Python that a rank has waited in for some seconds, so that ranks that wait for
each other in two of them are found. With ``HVDKIT_CHECK=1`` they report every collective, those of graphs included:

Ranks match the collectives of their graphs by name, and those that they call in Python by order. If ranks build or run
different graphs, all of them come to wait, each for a collective that another rank never enters: another dtype, a
branch that only one of them takes. Or they match by chance and go on with wrong numbers: two collectives in another
order, or one more in between. Both are found within seconds, with the source lines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from hvdkit.watchdog.flight import Record

SETTLED = 2.0
"""Seconds without a change, after which no message of a rank about its collectives can still be on its way."""


class Difference(NamedTuple):
    """The first rank that differs from the others, and how."""

    rank: int
    cause: str


class Waits:
    """The collectives in which ranks wait now, by the name by which ranks match them.

    Args:
        heard: returns when a rank's last message arrived. Messages of one rank arrive in order, so a rank that has
            not reported the end of a collective waited in it until then.
    """

    def __init__(self, heard: Callable[[int], float]) -> None:
        self._heard = heard
        self._pending: dict[int, dict[str, Record]] = defaultdict(dict)
        self._last: dict[int, dict[str, Record]] = defaultdict(dict)  # by name, whether it waits in it or not
        self._lines: dict[str, set[str]] = defaultdict(set)  # the source lines of each name, on any rank
        self._ambiguous: set[str] = set()  # names that have several
        self._shuffled: Difference | None = None
        self._changed: dict[int, float] = {}  # when a message of each rank about its collectives arrived last
        self._compared = 0.0

    def begin(self, rank: int, record: Record, now: float) -> None:
        """Note that a rank waits in a collective."""
        if record.participants == ():  # too many to be recorded: the ranks that it waits for are not known
            return
        key = record.key
        self._pending[rank][key] = record
        self._changed[rank] = now
        if not record.is_eager and self._shuffled is None:
            self._last[rank][key] = record
            lines = self._lines[key]
            lines.add(record.line)
            if len(lines) > 1:
                self._ambiguous.add(key)
            if self._ambiguous:  # otherwise no rank differs, and ranks need not be compared one by one
                self._shuffled = self._seek_shuffled(rank, key, record.line)

    def end(self, rank: int, key: str, now: float) -> None:
        """Note that a rank has come out of a collective."""
        self._pending[rank].pop(key, None)
        self._changed[rank] = now
        if not self._pending[rank]:
            del self._pending[rank]

    def only(self, rank: int, record: Record | None, now: float) -> None:
        """Note the one eager collective in which a rank has waited for a while, or None."""
        if list(self._pending.get(rank, ())) == ([] if record is None else [record.key]):
            return
        self._pending.pop(rank, None)
        if record is not None:
            self.begin(rank, record, now)

    def difference(self, ranks: Set[int], now: float) -> Difference | None:
        """Return why ``ranks`` cannot continue, once all messages about it must have arrived.

        Ranks are compared every :data:`SETTLED` seconds: those from which no message has come in that time.
        """
        if self._shuffled is not None or now - self._compared < SETTLED or not self._pending:
            return self._shuffled
        self._compared = now
        settled = {rank for rank in self._pending.keys() & ranks if now - self._changed[rank] >= SETTLED}
        return self.mismatch(settled) or self._deadlock(ranks, settled)

    def _seek_shuffled(self, rank: int, key: str, line: str) -> Difference | None:
        """Return the difference if one line has two names, on two ranks, of which one is another line there.

        Different lines alone are no difference: ranks may call one function, or ``fit``, from different lines.
        """
        here = {name: one.line for name, one in self._last[rank].items()}
        again = any(name != key and one == line for name, one in here.items())
        for other in self._last.keys() - {rank}:
            there = {name: one.line for name, one in self._last[other].items()}
            for name, one in there.items():
                if name != key and one == line and here.get(name, line) != line:
                    return self._compare(name)
            taken = there.get(key, line)
            if taken != line and (taken in here.values() or (line in there.values() and not again)):
                return self._compare(key)
        return None

    def _compare(self, key: str) -> Difference | None:
        same = {rank: found[key] for rank, found in sorted(self._last.items()) if key in found}
        return _difference(same, lambda record: record.line)

    def mismatch(self, ranks: Set[int] | None = None) -> Difference | None:
        """Return the first of ``ranks`` whose collective differs from that of the same name on most others."""
        together: dict[str, dict[int, Record]] = defaultdict(dict)
        for rank in sorted(self._pending if ranks is None else ranks):
            for key, record in self._pending[rank].items():
                if not record.is_eager:
                    together[key][rank] = record
        found = (_difference(there, lambda record: record.what) for there in together.values())
        return next(filter(None, found), None)

    def _deadlock(self, ranks: Set[int], settled: Set[int]) -> Difference | None:
        """Return which rank waits in which collective, if some of the ``settled`` wait for each other.

        A rank may have continued since it reported. So a message of each of them must have arrived since the last one
        began to wait: then all of them waited at that moment.
        """
        stuck = self._waiting_for_each_other(ranks, settled)
        if not stuck or min(map(self._heard, stuck)) <= max(self._changed[rank] for rank in stuck):
            return None
        where = {rank: next(iter(self._pending[rank])) for rank in sorted(stuck)}
        usual = Counter(where.values()).most_common(1)[0][0]
        other = next(rank for rank, key in where.items() if key == usual)
        theirs = self._pending[other][usual]
        missing = (rank for rank in theirs.participants or ranks if rank in stuck and usual not in self._pending[rank])
        odd = min(missing, default=other)
        words = f"waits in {self._pending[odd][where[odd]]}, but rank {other} in {theirs}, and neither can go on"
        return Difference(odd, f"CollectiveMismatchError: {words}; make every rank enter the same collectives")

    def _waiting_for_each_other(self, ranks: Set[int], settled: Set[int]) -> set[int]:
        """Return the ranks of which each waits only in collectives that another one of them has not entered."""
        missing: dict[str, set[int]] = {}  # of each collective, the ranks that have not entered it
        for rank in settled:
            for key, record in self._pending[rank].items():
                missing.setdefault(key, set(record.participants or ranks)).discard(rank)
        stuck, size = set(settled), -1
        while len(stuck) != size:
            size = len(stuck)
            stuck = {rank for rank in stuck if all(missing[key] & stuck for key in self._pending[rank])}
        return stuck


def _difference(there: Mapping[int, Record], kind: Callable[[Record], str]) -> Difference | None:
    """Return the first rank whose record is of another kind than most, or None.

    The majority is assumed to be right; of two equally large groups, the one with the lowest rank.
    """
    kinds = {rank: kind(record) for rank, record in there.items()}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    odd = next((rank for rank in kinds if kinds[rank] != usual), None)
    if odd is None:
        return None
    other = next(rank for rank in kinds if kinds[rank] == usual)
    words = f"is in {there[odd]}, but rank {other} in {there[other]}"
    return Difference(odd, f"CollectiveMismatchError: {words}; build the same graph on every rank")
