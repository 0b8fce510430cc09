"""Pairwise parameters: every pair of values is in a case, and there are few cases; loops name the case that failed."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from helpers.cases import case
from helpers.pairwise import covering, each, pairs, pairwise, printed, some_at
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_pair_is_in_some_case(sizes):
    cases = covering(sizes)
    assert cases == covering(sizes)
    assert all(len(case) == len(sizes) and all(0 <= v < n for v, n in zip(case, sizes, strict=True)) for case in cases)
    for i, j in combinations(range(len(sizes)), 2):
        assert {(case[i], case[j]) for case in cases} == set(product(range(sizes[i]), range(sizes[j])))
    assert {case[0] for case in cases} == set(range(sizes[0]))


def test_cases_are_few():
    """The minimum is the number of pairs of the two largest parameters."""
    assert len(covering([3, 4])) == 12
    assert len(covering([13, 2, 3])) == 39
    assert len(covering([3, 3, 2, 2])) <= 10
    assert len(covering([2] * 10)) <= 10


def test_every_value_is_in_some_case_and_they_are_not_in_step():
    axes = {"dtype": [*"abcdefghijk"], "n": [3, 20_000], "mode": ["eager", "graph"], "call": [len, max, min]}
    cases = each(**axes)
    assert cases == each(**axes) and len(cases) == 11
    for number, values in enumerate(axes.values()):
        assert [value for value in values if value not in [case[number] for case in cases]] == []
    assert {(n, mode) for _, n, mode, _ in cases} == set(product(axes["n"], axes["mode"]))


def test_a_mark_names_the_values():
    mark = pairwise(dtype=["a", "b"], n=[1, 2], mode=[len, max]).mark
    assert mark.args[0] == "dtype,n,mode" and len(mark.args[1]) == 4
    assert {(dtype, mode) for dtype, _, mode in mark.args[1]} == set(product("ab", [len, max]))


def test_every_eighth_case_runs_at_more_numbers_of_ranks():
    listed = some_at((3, 1), [(number,) for number in range(9)])
    marks = {each.values: [mark.args for mark in each.marks] for each in listed}
    assert marks.pop((0,)) == marks.pop((8,)) == [(1, 2, 3)] and not any(marks.values())


def test_the_last_line_printed_is_the_case_that_failed(capsys):
    for dtype, n in printed(pairs(dtype=["a", "b"], n=[1, 2])):
        if (dtype, n) == ("b", 1):
            break
    assert capsys.readouterr().out.splitlines()[-1] == "case: ('b', 1)"


def test_an_error_in_a_loop_names_its_case():
    with pytest.raises(AssertionError, match=r"^in the case n=2, kind='a': AssertionError: too few"):
        for n in (3, 2, 1):
            with case(n=n, kind="a"):
                assert n > 2, "too few"
    not_raised = pytest.raises(AssertionError, match=r"^in the case n=1: Failed: DID NOT RAISE")
    with not_raised, case(n=1), pytest.raises(ValueError, match="x"):
        pass
