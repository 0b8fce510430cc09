"""Which tests run: each belongs to a tier and, in tests/parallel, runs at some numbers of ranks.

    @pytest.mark.core           # in every tier
    @pytest.mark.core(2)        # of tests/parallel: in every tier at 2 ranks, at other numbers not in the core tier
    @pytest.mark.ranks(2, 3)    # of tests/parallel: at these numbers of ranks; without the mark only at 2
    @pytest.mark.full           # not in the core tier; the default, except in tests/unit
    @pytest.mark.nightly        # in the nightly tier only
    @pytest.mark.nightly(1, 3)  # of tests/parallel: in the nightly tier only at these numbers of ranks

    core     `make test`: ten minutes on two slow cores
    rest     what `all` has in addition
    all      `make test-all`: half an hour
    nightly  `make test-nightly`: every test; those of tests/parallel also at 2 and 3 ranks

A test of tests/unit is in the core tier unless it is marked otherwise. The lowest number of a mark `ranks` is what the
test needs: no tier runs it on fewer ranks, and pytest without a tier skips it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal, get_args

import pytest

Tier = Literal["core", "rest", "all", "nightly"]
TIERS: tuple[str, ...] = get_args(Tier)
MARKS = {
    "core(*numbers)": "in every tier, also in `make test`; with numbers of ranks, in the core tier at these only",
    "full": "not in the core tier",
    "nightly(*numbers)": "in the nightly tier only; with numbers of ranks, at these",
    "ranks(*numbers)": "the numbers of ranks at which a test of tests/parallel runs, default 2",
}
_OF_TESTS = ("core", "full", "nightly")
_NIGHTLY_RANKS = (2, 3)
_ANY_RANKS = (1, 2, 3, 4)
EXAMPLES_VARIABLE = "HVDKIT_TEST_EXAMPLES"
NIGHTLY_EXAMPLES = 1000
"""Random examples of each test in the nightly tier: see :mod:`fuzzing`."""


def selects(tier: Tier, size: int, item: pytest.Item) -> bool:
    """Return True if a tier runs this test on ``size`` ranks.

    Raises:
        pytest.UsageError: the test's marks are invalid, or its name differs from one start to the next.
    """
    if " at 0x" in item.nodeid:
        raise pytest.UsageError(f"{item.nodeid}: got an address in a name, expected the same at each start; pass ids=")
    own = tier_of(item, size)
    if tier == "nightly":
        return size in ranks_of(item) or (size in _NIGHTLY_RANKS and needs_more_ranks(size, item) is None)
    in_tier = own == "core" if tier == "core" else own == "full" if tier == "rest" else own != "nightly"
    return in_tier and size in ranks_of(item)


def tier_of(item: pytest.Item, size: int) -> str:
    """Return "core", "full" or "nightly" on ``size`` ranks: the mark of a case, its test, its class or its module.

    A mark "nightly" with numbers of ranks is an exception to the others.
    """
    for mark in item.iter_markers("nightly"):
        if not all(n in _ANY_RANKS for n in mark.args):
            raise pytest.UsageError(f"{item.nodeid}: got nightly{mark.args}, expected numbers from 1 to 4")
        if size in mark.args:
            return "nightly"
    for node in reversed(item.listchain()):
        for mark in reversed(node.own_markers):  # those of a case come after those of its function
            if mark.name in _OF_TESTS and not (mark.name == "nightly" and mark.args):
                return "full" if mark.args and size not in mark.args else mark.name
    return "core" if "unit" in item.path.parts else "full"


def needs_more_ranks(size: int, item: pytest.Item) -> str | None:
    """Return why a test cannot run on ``size`` ranks, or None if it can."""
    ranks = ranks_of(item)
    if item.get_closest_marker("ranks") is None or size >= min(ranks):
        return None
    return f"needs at least {min(ranks)} ranks, got {size}; it is marked ranks{ranks}"


def ranks_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the numbers of ranks at which a test runs: 1 outside tests/parallel."""
    mark = item.get_closest_marker("ranks")
    if "parallel" not in item.path.parts:
        if mark is not None:
            raise pytest.UsageError(f"{item.nodeid}: ranks(...) is a mark of tests/parallel; remove it")
        return (1,)
    if mark is None:
        return (2,)
    if not mark.args or not all(n in _ANY_RANKS for n in mark.args):
        raise pytest.UsageError(f"{item.nodeid}: got ranks{mark.args}, expected numbers from 1 to 4, e.g. ranks(2, 3)")
    return mark.args


def at_night(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Return test parameters that run in the nightly tier, except the cases in ``but``, which run in the test's own."""
    return _marked(cases, but, pytest.mark.nightly)


def after_core(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Return parameters of a core test that run in the tier after it, except the cases in ``but``."""
    return _marked(cases, but, pytest.mark.full)


def _marked(cases: Iterable[Any], but: Collection[Any], mark: pytest.MarkDecorator) -> list[Any]:
    listed = list(cases)
    assert all(case in listed for case in but), but
    return [pytest.param(case, marks=[mark] * (case not in but)) for case in listed]
