"""Pairwise test parameters: every pair of values of two parameters occurs in a case, without the whole product.

    @pairwise(dtype=["float16", "float32", "float64"], n=[3, 20_000], mode=["eager", "graph"])
    def test_sum(dtype, n, mode): ...  # 6 cases, not 12

Most defects depend on one parameter or on two at once. With two parameters the cases are the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return cases, one index per parameter, that together contain every pair of two parameters' values.

    Deterministic: each case begins with the first missing pair; every other parameter takes the value
    that adds most missing pairs and, among equals, has been used least.

    Args:
        sizes: number of values of each parameter.
    """
    if len(sizes) < 2:
        return [(value,) for size in sizes for value in range(size)]
    axes = range(len(sizes))
    missing = {
        ((i, a), (j, b)): None for i, j in combinations(axes, 2) for a, b in product(range(sizes[i]), range(sizes[j]))
    }
    used = {(axis, value): 0 for axis in axes for value in range(sizes[axis])}
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for axis in axes:
            if axis not in case:
                pairs = [
                    sum(tuple(sorted([(axis, value), one])) in missing for one in case.items())
                    for value in range(sizes[axis])
                ]
                case[axis] = min(range(sizes[axis]), key=lambda value: (-pairs[value], used[axis, value]))
        for one in case.items():
            used[one] += 1
        for pair in combinations(sorted(case.items()), 2):
            missing.pop(pair, None)
        cases.append(tuple(case[axis] for axis in axes))
    return cases


def pairwise(contract_every: int | None = None, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Return the mark that runs a test with every pair of its parameters' values.

    Args:
        contract_every: see :func:`contract_in`.
    """
    values = list(axes.values())
    cases = [tuple(axis[at] for axis, at in zip(values, case, strict=True)) for case in covering([*map(len, values)])]
    return pytest.mark.parametrize(
        ",".join(axes), cases if contract_every is None else contract_in(cases, contract_every)
    )


def contract_in(cases: Sequence[tuple[Any, ...]], every: int) -> list[Any]:
    """Return test parameters of which every n-th case is marked `contract`, for tests that take long to trace."""
    return [pytest.param(*case, marks=[pytest.mark.contract] * (i % every == 0)) for i, case in enumerate(cases)]
