"""Agreements of ranks simulated by threads, with an exchange that returns the values of all threads."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.cases import case
from helpers.speed import WAIT

from hvdkit.cluster.agreement import agree, compare, find_outlier, gather, run_and_describe, run_on_all_ranks
from hvdkit.errors import CheckpointError, ClusterError, CollectiveMismatchError, CorruptCheckpointError


class Exchange:
    """The exchange of one rank, whose number in the world is ``ranks[index]``."""

    def __init__(self, index, ranks, barrier, parts):
        self.index, self.ranks, self.size = index, ranks, len(ranks)
        self._barrier, self._parts = barrier, parts
        self.count = 0

    def allgather_bytes(self, data, name):
        self.count += 1
        self._parts[self.index] = data
        self._barrier.wait(timeout=WAIT)
        found = list(self._parts)
        self._barrier.wait(timeout=WAIT)
        return found


def everywhere(size, call, ranks=None):
    """Return what ``call`` returned or raised on each rank, given an exchange and the rank's index."""
    ranks, barrier, parts = ranks or range(size), threading.Barrier(size), [b""] * size

    def run(index):
        exchange = Exchange(index, ranks, barrier, parts)
        try:
            result = call(exchange, index)
        except Exception as error:
            result = error
        assert exchange.count == (size > 1)  # a single exchange suffices
        return result

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def same(outcomes, kind):
    """Return the message raised by all ranks."""
    assert {type(each) for each in outcomes} == {kind}
    (message,) = {str(each) for each in outcomes}
    return message


def test_equal_values_come_back_in_rank_order():
    for size in (1, 2, 3, 4):
        agreed = everywhere(size, lambda exchange, index: agree(exchange, lambda: [1, 2], "units", "pass one"))
        assert agreed == [[[1, 2]] * size] * size
        gathered = everywhere(size, lambda exchange, index: gather(exchange, "index", lambda: index))
        assert gathered == [list(range(size))] * size


def locks(size, failing=None):
    """Return every rank's result and the descriptions, with and without, if one rank may fail."""

    def locked(index):
        if index == failing:
            raise CorruptCheckpointError("no lock")
        return index, threading.Lock()  # cannot be pickled

    def describing(exchange, index):
        return run_and_describe(exchange, "locks", lambda: locked(index), lambda own: own[0], error=CheckpointError)

    def running(exchange, index):
        return run_on_all_ranks(exchange, "locks", lambda: locked(index), error=CheckpointError)

    return everywhere(size, describing), everywhere(size, running)


def test_a_result_stays_on_its_rank_and_only_its_description_is_sent():
    for size in (1, 3):
        described, kept = locks(size)
        for rank in range(size):
            (number, _), descriptions = described[rank]
            assert (number, descriptions, kept[rank][0]) == (rank, list(range(size)), rank)
    for outcomes in locks(3, failing=1):
        for rank in range(3):
            text = "no lock" if rank == 1 else "locks: rank 1 raised CorruptCheckpointError: no lock"
            assert type(outcomes[rank]) is CorruptCheckpointError and str(outcomes[rank]) == text


OUTLIERS = {
    "ab": "got 'b' on rank 1, expected 'a', as on rank 0;",
    "baa": "got 'b' on rank 0, expected 'a', as on rank 1 and 1 other;",
    "abaa": "got 'b' on rank 1, expected 'a', as on rank 0 and 2 others;",
    "abac": "got 'b' on rank 1 (rank 3 also differs), expected 'a', as on rank 0 and 1 other;",
    "aabb": "got 'b' on rank 2 (rank 3 also differs), expected 'a', as on rank 0 and 1 other;",
    "cabdbb": "got 'a' on rank 1 (ranks 2, 3, 4, 5 also differ), expected 'c', as on rank 0;",
    "bbabab": "got 'a' on rank 2 (rank 4 also differs), expected 'b', as on rank 0 and 3 others;",
}


def test_all_ranks_name_the_lowest_that_differs_from_most():
    for values, words in OUTLIERS.items():

        def call(exchange, index, values=values):
            return agree(exchange, lambda: values[index], "units", "pass one")

        with case(values=values):
            message = same(everywhere(len(values), call), CollectiveMismatchError)
            assert f"units: {words}" in message and "; pass one" in message


def test_ranks_of_a_group_are_named_by_their_numbers_in_the_world():
    outcomes = everywhere(
        3, lambda exchange, index: agree(exchange, lambda: index == 1, "x", "pass one"), ranks=(2, 5, 7)
    )
    assert "got True on rank 5, expected False, as on rank 2 and 1 other" in same(outcomes, CollectiveMismatchError)


def test_values_need_no_hash_and_may_show_what_differs():
    with pytest.raises(ValueError, match=r"x: got b on rank 2, expected a, as on rank 0 and 1 other; y"):
        compare(
            [{"a": []}, {"a": [1]}, {"b": []}],
            "x",
            "y",
            error=ValueError,
            key=sorted,
            show=lambda odd, usual: (*odd, *usual),
        )
    assert find_outlier([[1], [2], [2], [1], [2]]) == (0, 1)


def test_nan_equals_itself_and_arrays_are_compared_whole():
    nan = pickle.loads(pickle.dumps([float("nan")]))  # received from another rank, so a different object
    assert find_outlier([nan, [float("nan")]]) is None
    assert find_outlier([nan, [1.0], nan]) == (1, 0)
    assert find_outlier([np.ones(2), np.ones(2), np.zeros(2)]) == (2, 0)


OWN = type("Own", (CorruptCheckpointError,), {})
# The number of ranks, a rank's problem, the error class of the exchange, and the class that other ranks raise.
PROBLEMS = [
    (1, ValueError("bad"), ClusterError, ClusterError),
    (2, ValueError("bad"), ClusterError, ClusterError),
    (3, CheckpointError("bad"), CheckpointError, CheckpointError),
    (4, CorruptCheckpointError("bad"), CheckpointError, CorruptCheckpointError),
    (2, OWN("bad"), CheckpointError, CorruptCheckpointError),
]


def test_a_problem_is_raised_as_it_is_there_and_named_on_all_others():
    for size, problem, error, raised in PROBLEMS:
        bad = size // 2

        def call(exchange, index, bad=bad, problem=problem, error=error):
            def value():
                if index == bad:
                    raise problem

            return gather(exchange, "saving", value, error=error)

        for ranks in (range(size), range(3, 3 + size)):  # all ranks, or a group
            outcomes = everywhere(size, call, ranks)
            with case(size=size, problem=problem, ranks=ranks):
                assert outcomes.pop(bad) is problem
                if outcomes:
                    assert same(outcomes, raised) == f"saving: rank {ranks[bad]} raised {type(problem).__name__}: bad"


def test_of_several_problems_the_lowest_rank_s_is_named():
    def value(index):
        if index in (1, 3):
            raise KeyError(index)

    outcomes = everywhere(4, lambda exchange, index: gather(exchange, "saving", lambda: value(index)))
    assert [type(each) for each in outcomes] == [CollectiveMismatchError, KeyError, CollectiveMismatchError, KeyError]
    assert str(outcomes[0]) == str(outcomes[2]) == "saving: rank 1 raised KeyError: 1"


def test_a_value_that_cannot_be_pickled_is_a_problem():
    outcomes = everywhere(2, lambda exchange, index: gather(exchange, "saving", lambda: [lambda: None][index:]))
    assert not isinstance(outcomes[0], CollectiveMismatchError)
    assert "saving: rank 0 raised " in str(outcomes[1])


def test_a_rank_in_another_exchange_is_named():
    for other in (b"", pickle.dumps((1, 2)), pickle.dumps((1, 2, 3)), b"no pickle"):

        def call(exchange, index, other=other):
            if index == 1:
                exchange.allgather_bytes(other, "another")
                return None
            return gather(exchange, "saving", lambda: None)

        outcomes = everywhere(3, call)
        assert "got another exchange on rank 1, expected saving, as on rank 0" in str(outcomes[0]), other
    calls = everywhere(3, lambda exchange, index: gather(exchange, "restoring" if index == 0 else "saving", str))
    assert "got restoring on rank 0, expected saving, as on rank 1 and 1 other" in same(calls, CollectiveMismatchError)
