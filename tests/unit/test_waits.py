"""From the reports of ranks, find which wait for each other. Jobs: tests/jobs."""

from __future__ import annotations

from helpers.cases import case

from hvdkit.watchdog.flight_recorder import CollectiveRecord, ranks_text
from hvdkit.watchdog.waits import SETTLED, SETTLED_IN_GRAPH, Waits


def record(key: str, what: str, line: str, ranks: list[int] | None = None) -> CollectiveRecord:
    return CollectiveRecord(1, key, what, line, ranks_text(tuple(ranks or ())), 0, None, 0.0, None)


class Ranks:
    """Waits, with a clock that the test advances; every rank reports at each advance."""

    def __init__(self, size: int) -> None:
        self.now, self.size = 1000.0, size
        self.heard = dict.fromkeys(range(size), self.now)
        self.waits = Waits(self.heard.__getitem__)

    def pass_time(self, seconds: float, *, heard: bool = True) -> None:
        self.now += seconds
        if heard:
            self.heard = dict.fromkeys(range(self.size), self.now)
            self.waits._heard = self.heard.__getitem__

    def wait_in(self, rank: int, name: str, ranks: list[int] | None = None):
        """Report that ``rank`` has waited in an eager collective for a while."""
        self.waits.replace(rank, [record(f"eager {name}", name, "x.py:1", ranks)], self.now)

    def difference(self):
        return self.waits.difference(set(range(self.size)), self.now)


def wait_in(*pending: str, seconds: float = SETTLED_IN_GRAPH + SETTLED):
    """Return the difference of ranks that wait in "a" in a graph; in "a01" only ranks 0 and 1 are; "a=x" is an x."""
    ranks = Ranks(len(pending))
    for rank, words in enumerate(pending):
        pairs = [word.partition("=")[::2] for word in words.split()]
        records = [
            record(key, what or key[0], f"{key[0]}.py:1", [int(number) for number in key[1:]] or None)
            for key, what in pairs
        ]
        ranks.waits.replace(rank, records, ranks.now)
    ranks.pass_time(seconds)
    return ranks.difference()


def test_ranks_that_go_on_alone():
    assert wait_in("a", "a", "a") is None  # in progress
    assert wait_in("a", "") is None  # a rank that computes will come
    assert wait_in("a b", "b c") is None
    assert wait_in("a", "b", seconds=SETTLED) is None  # messages are on their way
    assert wait_in("a01", "a01", "b") is None


def test_ranks_that_cannot_go_on():
    for pending, odd, words in (
        (("a", "a", "b"), 2, "waits in b (b.py:1), but rank 0 in a (a.py:1)"),
        (("b", "a", "a"), 0, "waits in b (b.py:1), but rank 1 in a (a.py:1)"),
        (("a01", "b", "b"), 0, "waits in a (a.py:1), but rank 1 in b (b.py:1)"),
        (("a=x", "a=x", "a=y"), 2, "is in y (a.py:1), but rank 0 in x (a.py:1)"),
        (("a=y", "a=x", "a=x"), 0, "is in y (a.py:1), but rank 1 in x (a.py:1)"),
    ):
        with case(pending=pending):
            found = wait_in(*pending)
            assert found.rank == odd and words in found.cause and found.cause.startswith("CollectiveMismatchError: ")


def test_ranks_that_wait_for_each_other_eagerly_are_heard_again_first():
    """A rank may have continued since its report: each must report after the last one began to wait."""
    for places, stuck in (
        (([0, 1], [1, 2], [0, 2]), True),
        (([0, 1, 2, 3], [0, 1], [0, 1, 2, 3], [2, 3]), True),
        (([0, 1], [1, 2, 0], None, [2, 3]), True),  # rank 2 computes, rank 3 waits for it; 0 and 1 are stuck
        (([0, 1], [0, 1], [2, 3], [2, 3]), False),  # all in progress
        (([0, 1], None, [0, 1, 2]), False),  # rank 1 will come
        (([0, 1], [0, 1], [0, 1, 2]), False),  # 0 and 1 will come
    ):
        with case(places=places):
            ranks = Ranks(len(places))
            for rank, taking_part in enumerate(places):
                if taking_part is not None:
                    ranks.wait_in(rank, f"sum of {taking_part}", taking_part)
            ranks.pass_time(SETTLED, heard=False)
            assert ranks.difference() is None, "no rank has been heard since"
            ranks.pass_time(SETTLED)
            found = ranks.difference()
            assert (found is not None) is stuck
            if stuck:
                assert places[found.rank] is not None and found.cause.endswith(
                    "and neither can continue; make every rank enter the same collectives"
                )


def test_a_rank_that_has_gone_on_is_not_stuck():
    ranks = Ranks(2)
    for rank, name in enumerate("ab"):
        ranks.wait_in(rank, name)
    ranks.pass_time(SETTLED - 0.5)
    ranks.waits.replace(1, [], ranks.now)
    ranks.pass_time(10)
    assert ranks.difference() is None and not ranks.waits._pending.get(1)
    ranks.wait_in(1, "a")
    ranks.pass_time(10)
    assert ranks.difference() is None and [*ranks.waits._pending[1]] == ["eager a"]


def test_reports_of_the_same_wait_change_nothing():
    ranks = Ranks(2)
    for _ in range(8):
        for rank, name in enumerate("ab"):
            ranks.wait_in(rank, name)
        ranks.pass_time(SETTLED / 4)
    assert ranks.difference().rank == 1
