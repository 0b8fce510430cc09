"""Pairwise test parameters: every pair of values of two parameters occurs in a case, without the whole product.

    @pairwise(dtype=["float16", "float32", "float64"], n=[3, 20_000], mode=["eager", "graph"])
    def test_sum(dtype, n, mode): ...  # 6 cases, not 12

Most defects depend on one parameter or on two at once. With two parameters the cases are the product. A loop inside a
test costs less than a test per case: ``for dtype, n in printed(pairs(dtype=..., n=...))``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
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


def pairwise(ranks: Sequence[int] = (), **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Return the mark that runs a test with every pair of its parameters' values.

    Args:
        ranks: see :func:`some_at`.
    """
    return pytest.mark.parametrize(",".join(axes), some_at(ranks, pairs(**axes)) if ranks else pairs(**axes))


def pairs(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return tuples of values, one per axis, with every pair of two axes' values."""
    values = list(axes.values())
    return [tuple(axis[at] for axis, at in zip(values, case, strict=True)) for case in covering([*map(len, values)])]


def each(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return tuples of values, one per axis, in which every value occurs: as many as the longest axis has values.

    Values are combined at random, and alike in every process.
    """
    length = max(map(len, axes.values()))
    columns = []
    for number, values in enumerate(axes.values()):
        chance = random.Random(number)
        order = [at for _ in range(-(-length // len(values))) for at in chance.sample(range(len(values)), len(values))]
        columns.append([values[at] for at in order[:length]])
    return list(zip(*columns, strict=True))


def printed(cases: Iterable[Any]) -> Iterator[Any]:
    """Yield the cases of a loop inside a test, and print each: the output of a failed test ends with its case."""
    for case in cases:
        print(f"case: {case}")
        yield case


def some_at(ranks: Sequence[int], cases: Sequence[tuple[Any, ...]], every: int = 8) -> list[Any]:
    """Return test parameters of which every n-th case also runs at these numbers of ranks, the others at 2."""
    mark = pytest.mark.ranks(*sorted({2, *ranks}))
    return [pytest.param(*case, marks=[mark] * (i % every == 0)) for i, case in enumerate(cases)]
