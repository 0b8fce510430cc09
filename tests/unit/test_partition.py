"""Ownership of rows: every row has one owner, for every rule, number of rows and number of ranks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers.cases import case
from hypothesis import given
from hypothesis import strategies as st

import hvdkit as hk
from hvdkit.sharding.keys import key_dtype, keys_of
from hvdkit.sharding.partition import (
    boxes_of,
    flat_ranges,
    flat_shard_size,
    intersect,
    positions,
    rows_of,
)

RULES = st.sampled_from(["div", "mod"])
ROWS = st.integers(0, 60)
SIZES = st.integers(1, 70)
RANGES = st.builds(
    lambda start, count, step: range(start, start + count * step, step),
    st.integers(0, 40),
    st.integers(0, 30),
    st.integers(1, 12),
)


@given(RULES, ROWS, SIZES)
def test_the_rules_are_those_of_embedding_lookup(rule, rows, size):
    owned = [list(rows_of(rule, rows, rank, size)) for rank in range(size)]
    if rule == "mod":
        assert owned == [list(range(rank, rows, size)) for rank in range(size)]
    else:
        assert [row for some in owned for row in some] == list(range(rows))
    counts = [len(some) for some in owned]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


def test_arguments_out_of_range_are_refused():
    for arguments, told in (
        (("row", 5, 0, 2), "partition: got row"),
        (("div", -1, 0, 2), "rows >= 0"),
        (("mod", 5, 2, 2), "rank < size"),
        (("mod", 5, -1, 2), "0 <= rank"),
        (("mod", 5, 0, 0), "rank < size"),
    ):
        with case(arguments=arguments, told=told), pytest.raises(ValueError, match=told):
            rows_of(*arguments)


@given(RANGES, RANGES)
def test_intersect_is_that_of_sets(a, b):
    common = intersect(a, b)
    assert list(common) == sorted({*a} & {*b})
    assert bool(common) == bool({*a} & {*b})
    assert common == intersect(b, a)


@given(RANGES, st.data())
def test_positions_are_where_numbers_stand(whole, data):
    first = data.draw(st.integers(0, max(0, len(whole) - 1)))
    part = whole[first :: data.draw(st.integers(1, 5))]
    part = part[: data.draw(st.integers(0, len(part)))]
    assert list(whole)[positions(part, whole)] == list(part)


@given(RULES, RULES, ROWS, st.integers(1, 9), st.integers(1, 9), st.data())
def test_rows_find_their_way_to_other_owners(before, after, rows, old, new, data):
    """As in a restore: each new owner reads from each old owner the rows that both own."""
    rank = data.draw(st.integers(0, new - 1))
    mine = rows_of(after, rows, rank, new)
    got = [None] * len(mine)
    for source in range(old):
        theirs = rows_of(before, rows, source, old)
        common = intersect(theirs, mine)
        got[positions(common, mine)] = list(theirs)[positions(common, theirs)]
    assert got == list(mine)


@given(RULES, ROWS, SIZES)
def test_keys_agree_with_the_rows(rule, rows, size):
    ids = np.arange(rows)
    keys = keys_of(tf.constant(ids), rule, rows, size).numpy()
    owners, local = keys % size, keys // size
    for rank in range(size):
        held = list(rows_of(rule, rows, rank, size))
        assert list(ids[owners == rank]) == held
        assert list(local[owners == rank]) == list(range(len(held)))


def test_bad_ids_name_themselves():
    hk.init()
    variable = hk.PartitionedVariable((5, 2))
    with pytest.raises(ValueError, match="ids: got 0 to 5, expected 0 to 4"):
        variable.assign_rows(np.array([0, 5]), np.zeros((2, 2)))
    with pytest.raises(TypeError, match=r"ids: got float64\[1\], expected integers"):
        variable.assign_rows(np.array([0.5]), np.zeros((1, 2)))


@given(st.lists(st.integers(0, 30), max_size=6), SIZES)
def test_runs_are_equal_parts_of_arrays_laid_end_to_end(counts, size):
    held = [flat_ranges(counts, rank, size) for rank in range(size)]
    for place, count in enumerate(counts):
        assert [i for runs in held for i in runs[place]] == list(range(count))
    shares = [sum(map(len, runs)) for runs in held]
    assert max(shares) == flat_shard_size(sum(counts), size) and shares == sorted(shares, reverse=True)
    for runs in held:
        assert sum(0 < len(run) < count for run, count in zip(runs, counts, strict=True)) <= 2


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_a_run_in_its_order(shape, data):
    elements = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, elements.size))
    stop = data.draw(st.integers(start, elements.size))
    boxes = boxes_of(shape, range(start, stop))
    got = [elements[np.ix_(*box)].reshape(-1) if shape else elements.reshape(-1) for box in boxes]
    assert np.concatenate([[], *got]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_keys_of_more_rows_on_a_rank_than_int32_holds():
    """Tables of some billion rows, looked up by ids on both sides of 2**31 local rows."""
    from hvdkit.sharding.routing import KeyedVariable

    rows, size = 2**33 + 5, 3
    edges = np.array([0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 3 * 2**31 + 7, rows - 2, rows - 1])
    assert key_dtype(rows + size) is tf.int64
    source = KeyedVariable(None)
    for rule, base in itertools.product(("mod", "div"), (0, 2**31 + 3)):  # rows of other tables come first
        assert max(len(rows_of(rule, rows, rank, size)) for rank in range(size)) > 2**31
        owners, local = source.route(keys_of(tf.constant(edges), rule, rows, size, base=base), size)
        held = [rows_of(rule, rows, rank, size) for rank in range(size)]
        for edge, rank, row in zip(edges.tolist(), owners.numpy(), local.numpy(), strict=True):
            assert edge in held[rank] and row == held[rank].index(edge) + base
    owners, local = source.route(keys_of(tf.constant(edges), "whole", rows, size, base=7, rank=2), size)
    np.testing.assert_array_equal(owners, np.full(len(edges), 2))
    np.testing.assert_array_equal(local, edges + 7)
