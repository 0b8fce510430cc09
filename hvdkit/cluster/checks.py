"""In which collective each rank waits, compared on rank 0 through the watchdog.

Ranks that have waited for some seconds in a collective called from Python report it, so that those which wait for each
other in two of them are found. With ``HVDKIT_CHECK=1`` every rank reports every collective, those of graphs included:

Ranks match the collectives of their graphs by name, and those that they call in Python by order. Where they build or
run unlike graphs, all of them come to wait, each for something that another one never comes to: another dtype, a branch
that one takes alone. Or they match by chance, and go on with wrong numbers: two in another order, one more in between.
Both are found within seconds, with the source lines.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any, NamedTuple

# Messages of ranks that come out of a collective, and go into the next one, are so long on their way at most.
SETTLED = 2.0
EAGER = "eager "
"""With which the keys of eager collectives begin."""
_OURS = str(Path(__file__).resolve().parents[1])
_THEIRS = ("/tensorflow/", "/keras/", "/horovod/", "/autograph_generated", "__autograph_generated", "/contextlib.py")


def enabled() -> bool:
    """Return True where the person asked for the comparison."""
    return os.environ.get("HVDKIT_CHECK") == "1"


def source_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost of ``frames``, each a file and a line, outside of hvdkit, TensorFlow and Keras."""
    every = list(frames)
    own = [(file, line) for file, line in every if not file.startswith(_OURS) and not any(p in file for p in _THEIRS)]
    file, line = (own or every)[-1]
    return f"{file}:{line}"


class Waiting(NamedTuple):
    """A collective that a rank waits in.

    Attributes:
        what: collective, dtypes and shapes.
        line: the person's source line that led to it.
        ranks: those that take part; None: everybody.
        alike: ``what`` has to be the same on all of them.
    """

    what: str
    line: str
    ranks: tuple[int, ...] | None
    alike: bool

    def __str__(self) -> str:
        return f"{self.what} ({self.line})"


class Difference(NamedTuple):
    """The first rank that differs from the others, and in what."""

    rank: int
    cause: str


class Waits:
    """The collectives in which ranks wait right now, by the name by which ranks match them."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[str, Waiting]] = defaultdict(dict)
        self._last: dict[int, dict[str, Waiting]] = defaultdict(dict)  # by name, whether it waits in it or not
        self._lines: dict[str, set[str]] = defaultdict(set)  # the source lines of each name, on any rank
        self._ambiguous: set[str] = set()  # names that have several
        self._shuffled: Difference | None = None
        self._changed: dict[int, float] = {}  # when a message of each rank came last
        self._compared = 0.0  # when all were compared last
        self._stuck: dict[int, str | None] = {}  # ranks that cannot go on, and the key of their wait if it is eager
        self._unsure: set[int] = set()  # of these, those that have not answered that they still wait
        self.to_ask: list[int] = []  # of these, those that have not been asked

    def begin(self, rank: int, message: dict[str, Any]) -> None:
        """Note that a rank waits in a collective."""
        ranks = message.get("ranks")
        waiting = Waiting(
            message["what"], message["line"], tuple(ranks) if ranks else None, message.get("alike", False)
        )
        self._pending[rank][message["key"]] = waiting
        self._changed[rank] = time.monotonic()
        if waiting.alike and self._shuffled is None:
            self._last[rank][message["key"]] = waiting
            lines = self._lines[message["key"]]
            lines.add(waiting.line)
            if len(lines) > 1:
                self._ambiguous.add(message["key"])
            if self._ambiguous:  # otherwise no rank differs, and ranks need not be compared one by one
                self._shuffled = self._seek_shuffled(rank, message["key"], waiting.line)

    def end(self, rank: int, message: dict[str, Any]) -> None:
        """Note that a rank has come out of a collective."""
        self._pending[rank].pop(message["key"], None)
        self._changed[rank] = time.monotonic()
        if not self._pending[rank]:
            del self._pending[rank]

    def still(self, rank: int, key: str | None) -> None:
        """Note a rank's answer: the key of the eager collective in which it waits, or None."""
        if self._stuck.get(rank) == key is not None:
            self._unsure.discard(rank)

    def waiting(self, rank: int) -> Waiting | None:
        """Return the collective in which ``rank`` has waited longest."""
        return next(iter(self._pending.get(rank, {}).values()), None)

    def difference(self, ranks: Set[int], now: float) -> Difference | None:
        """Return what keeps ``ranks`` from going on, once no message about it can be on its way any more.

        Ranks are compared every :data:`SETTLED` seconds, those from which no message has come for as long.
        """
        if self._shuffled is not None or now - self._compared < SETTLED or not self._pending:
            return self._shuffled
        self._compared = now
        settled = {rank for rank in self._pending.keys() & ranks if now - self._changed[rank] >= SETTLED}
        return self.unlike(settled) or self._deadlock(ranks, settled)

    def _seek_shuffled(self, rank: int, key: str, line: str) -> Difference | None:
        """Return the difference where one line has two names, on two ranks, of which one is another line there.

        Other lines alone are none: ranks may call one function, or ``fit``, from different lines.
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
        return _unlike(same, [waiting.line for waiting in same.values()])

    def unlike(self, ranks: Set[int] | None = None) -> Difference | None:
        """Return the first of ``ranks`` that waits in another collective than others in the one of the same name."""
        together: dict[str, dict[int, Waiting]] = defaultdict(dict)
        for rank in sorted(self._pending if ranks is None else ranks):
            for key, waiting in self._pending[rank].items():
                if waiting.alike:
                    together[key][rank] = waiting
        differences = (_unlike(there, [waiting.what for waiting in there.values()]) for there in together.values())
        return next((difference for difference in differences if difference is not None), None)

    def _deadlock(self, ranks: Set[int], settled: Set[int]) -> Difference | None:
        """Return which rank waits in which collective, if some of the ``settled`` wait for each other.

        Messages travel, so a rank may have gone on since it reported. Those that wait in eager collectives are asked
        once more when all have reported: if each is still where it was, all waited at once when they were asked.
        """
        found = self._waiting_for_each_other(ranks, settled)
        stuck = {rank: next((key for key in self._pending[rank] if key.startswith(EAGER)), None) for rank in found}
        if stuck != self._stuck:
            self._stuck = stuck
            self.to_ask = [rank for rank, key in stuck.items() if key is not None]
            self._unsure = set(self.to_ask)
        if not stuck or self._unsure:
            return None
        where = {rank: next(iter(self._pending[rank])) for rank in sorted(stuck)}
        usual = Counter(where.values()).most_common(1)[0][0]
        other = next(rank for rank, key in where.items() if key == usual)
        theirs = self._pending[other][usual]
        odd = min(rank for rank in theirs.ranks or ranks if rank in stuck and usual not in self._pending[rank])
        words = f"waits in {self.waiting(odd)}, but rank {other} in {theirs}, and neither can go on"
        return Difference(odd, f"CollectiveMismatchError: {words}; let every rank come to the same collectives")

    def _waiting_for_each_other(self, ranks: Set[int], settled: Set[int]) -> set[int]:
        """Return the ranks of which each waits in collectives that all need another of them: none can go on."""
        there: dict[str, set[int]] = defaultdict(set)
        for rank in settled:
            for key in self._pending[rank]:
                there[key].add(rank)
        stuck, size = set(settled), -1
        while len(stuck) != size:
            size = len(stuck)
            may_end = {
                key: not any(
                    rank in stuck and rank not in there[key] for rank in self._pending[one][key].ranks or ranks
                )
                for key, members in there.items()
                for one in [next(iter(members))]
            }
            stuck = {rank for rank in stuck if not any(may_end[key] for key in self._pending[rank])}
        return stuck


def _unlike(there: dict[int, Waiting], kinds: list[str]) -> Difference | None:
    """Return the first rank of ``there`` whose kind is not the usual one, if any.

    Most ranks are taken to be right, of equally many those with the lowest one.
    """
    usual = Counter(kinds).most_common(1)[0][0]
    if all(kind == usual for kind in kinds):
        return None
    odd, other = (
        next(r for r, kind in zip(there, kinds, strict=True) if (kind == usual) is is_usual)
        for is_usual in (False, True)
    )
    words = f"is in {there[odd]}, but rank {other} in {there[other]}"
    return Difference(odd, f"CollectiveMismatchError: {words}; build the same graph on every rank")
