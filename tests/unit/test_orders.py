"""Shuffles in constant memory: the keyed permutation and the order of blocks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.data.block_order import BlockOrder
from hvdkit.data.permutation import Permutation

KEYS = st.tuples(st.integers(0, 2**64), st.integers(0, 1000))
LARGE = 2**20 + 7


@given(st.integers(1, 5000), KEYS)
@settings(max_examples=200, deadline=None)
def test_every_example_has_one_position(n, key):
    examples = Permutation(n, key)(np.arange(n))
    assert examples.dtype == np.int64
    np.testing.assert_array_equal(np.sort(examples), np.arange(n))


@given(st.integers(1, 2**62), KEYS, st.data())
@settings(max_examples=200, deadline=None)
def test_a_position_is_computed_without_the_others(n, key, data):
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.int64)
    examples = Permutation(n, key)(positions)
    assert ((examples >= 0) & (examples < n)).all()
    assert [int(Permutation(n, key)(p)) for p in positions] == examples.tolist()
    assert len(np.unique(examples)) == len(np.unique(positions))
    np.testing.assert_array_equal(Permutation(n, key)(positions.reshape(1, -1)), [examples])


def test_the_permutation_of_a_key_is_the_one_written_down_here():
    # If it changes, runs saved before cannot be continued.
    assert Permutation(10**10, (1, 0))(np.arange(3)).tolist() == [2106182212, 4205700185, 5012022141]
    assert Permutation(1000, (7, 2))(np.array([0, 999])).tolist() == [402, 310]


@pytest.mark.parametrize("key", [(0, 0), (1, 0), (1, 1)])
def test_the_permutation_looks_random(key):
    """Statistics that are within 5 standard deviations for all but one in a million uniform permutations."""
    examples = Permutation(LARGE, key)(np.arange(LARGE))
    batches = examples[: LARGE // 256 * 256].reshape(-1, 256) * 64 // LARGE  # 64 segments of the data, 4 rows of each
    counts = np.stack([np.bincount(batch, minlength=64) for batch in batches])
    chi_squared = ((counts - 4) ** 2 / 4).sum(axis=1)  # 63 degrees of freedom
    assert abs(chi_squared.mean() - 63) < 5 * np.sqrt(126 / len(batches))
    for shift in (1, 2, 256):
        correlation = np.corrcoef(examples[:-shift], examples[shift:])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(LARGE)
    gaps = np.histogram(np.mod(np.diff(examples), LARGE), 1000, (0, LARGE))[0]
    assert abs(((gaps - LARGE / 1000) ** 2 / (LARGE / 1000)).sum() - 999) < 5 * np.sqrt(2 * 999)
    other = Permutation(LARGE, (*key, 1))(np.arange(LARGE))
    assert (examples == other).sum() < 10  # on average 1


@st.composite
def block_orders(draw):
    """Return the first example of each block, the batch size, and a function that makes the order."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
    starts = np.cumsum([0, *sizes])
    batch_size = draw(st.integers(1, int(starts[-1]) + 3))
    lanes, window = draw(st.integers(1, batch_size)), draw(st.integers(1, 6))
    key = draw(st.none() | KEYS)
    return starts, batch_size, lambda: BlockOrder(starts, batch_size, lanes, window, key)


@given(block_orders(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_block_order_is_a_permutation_that_is_computed_at_any_position(drawn, data):
    starts, _, order = drawn
    n = int(starts[-1])
    examples = order()(np.arange(n))
    assert sorted(examples) == list(range(n))
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9)))
    np.testing.assert_array_equal(order()(positions), examples[positions])


@pytest.mark.parametrize("key", [None, (3, 1)])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_rank_reads_its_part_of_the_blocks_only(size, key):
    n, block, batch_size = 100_000, 250, 64
    order = BlockOrder(np.arange(0, n + 1, block), batch_size, lanes=8, window=512, key=key)
    blocks = order(np.arange(n)) // block
    rank = np.arange(n) % batch_size * size // batch_size
    for r in range(size):
        assert len(np.unique(blocks[rank == r])) * block <= n / size + 2 * 8 // size * block


def test_a_batch_of_a_block_order_has_rows_from_every_lane():
    n, lanes = 64_000, 16
    examples = BlockOrder(np.arange(0, n + 1, 1000), 64, lanes, 500, (1, 0))(np.arange(n)).reshape(-1, 64)
    blocks_per_batch = [len(np.unique(batch // 1000)) for batch in examples]
    assert min(blocks_per_batch) >= lanes - 2  # two lanes may be in one block where a lane ends
    unlike = BlockOrder(np.arange(0, n + 1, 1000), 64, lanes, 500, (1, 1))(np.arange(n)).reshape(-1, 64)
    assert (examples == unlike).mean() < 0.01


def test_without_a_key_lanes_read_the_data_in_order():
    order = BlockOrder(np.array([0, 4, 8]), batch_size=4, lanes=2, window=1, key=None)
    assert order(np.arange(8)).reshape(2, 4).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert BlockOrder(np.array([0, 4, 8]), 4, 1, 3, None)(np.arange(8)).tolist() == list(range(8))
