"""Shuffles in constant memory: the keyed permutation and the order of blocks."""

import numpy as np
import pytest
from helpers.cases import case
from helpers.data_files import block_order
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_the_permutation_looks_random():
    """Statistics that are within 5 standard deviations for all but one in a million uniform permutations."""
    for key in ((0, 0), (1, 0), (1, 1)):
        with case(key=key):
            check_randomness(key)


def check_randomness(key):
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
    """Return the number of examples, and a function that makes an order of blocks."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
    starts = np.cumsum([0, *sizes])
    batch_size = draw(st.integers(1, int(starts[-1]) + 3))
    lanes, window = draw(st.integers(1, batch_size)), draw(st.integers(1, 6))
    seed, epoch = draw(st.none() | st.integers(0, 2**64)), draw(st.integers(0, 3))
    return int(starts[-1]), lambda: block_order(starts, batch_size, lanes, window, seed, epoch)


@given(block_orders(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_block_order_is_a_permutation_that_is_computed_at_any_position(drawn, data):
    n, order = drawn
    examples = order()(np.arange(n))
    assert sorted(examples) == list(range(n))
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9)))
    np.testing.assert_array_equal(order()(positions), examples[positions])


def test_a_rank_reads_its_part_of_the_blocks_only():
    n, block, batch_size = 100_000, 250, 64
    for seed in (None, 3):
        order = block_order(range(0, n + 1, block), batch_size, lanes=8, window=512, seed=seed)
        blocks = order(np.arange(n)) // block
        for size in (1, 2, 4, 8):
            rank = np.arange(n) % batch_size * size // batch_size
            read = [len(np.unique(blocks[rank == r])) * block for r in range(size)]
            assert max(read) <= n / size + 2 * 8 // size * block, (seed, size)


def test_a_batch_of_a_block_order_has_rows_from_every_lane():
    n, lanes = 64_000, 16
    starts = range(0, n + 1, 1000)
    examples = block_order(starts, 64, lanes, 500, 1)(np.arange(n)).reshape(-1, 64)
    blocks_per_batch = [len(np.unique(batch // 1000)) for batch in examples]
    assert min(blocks_per_batch) >= lanes - 2  # two lanes may be in one block where a lane ends
    for unlike in (block_order(starts, 64, lanes, 500, 2), block_order(starts, 64, lanes, 500, 1, epoch=1)):
        assert (examples == unlike(np.arange(n)).reshape(-1, 64)).mean() < 0.01


def test_lanes_need_their_next_blocks_at_different_steps():
    n, block, batch_size, lanes = 256_000, 1000, 256, 16
    order = block_order(range(0, n + 1, block), batch_size, lanes, window=1000, seed=1)
    blocks = (order(np.arange(n)) // block).reshape(-1, batch_size)
    for rank in range(4):
        own, seen, new = blocks[:, rank * 64 : rank * 64 + 64], set(), []
        for batch in own:
            new.append(len(set(batch) - seen))
            seen |= set(batch)
        assert new[0] >= 4  # one of each lane
        assert max(new[1:]) <= 2


def test_without_a_seed_lanes_read_the_data_in_order():
    order = block_order([0, 4, 8], batch_size=4, lanes=2, window=1, seed=None)
    assert order(np.arange(8)).reshape(2, 4).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert block_order([0, 4, 8], 4, 1, 3, None)(np.arange(8)).tolist() == list(range(8))


def test_batches_of_a_block_order_are_almost_as_mixed_as_those_of_a_permutation():
    """Data sorted by class are the worst case: a block has one class."""
    n, classes, batch_size = 200_000, 100, 256

    def classes_per_batch(order):
        batches = order(np.arange(n // batch_size * batch_size)).reshape(-1, batch_size) * classes // n
        return np.mean([len(np.unique(batch)) for batch in batches])

    permuted = classes_per_batch(Permutation(n, (1, 0)))
    assert permuted == pytest.approx(classes * (1 - (1 - 1 / classes) ** batch_size), rel=0.01)
    starts = range(0, n + 1, 100)
    in_blocks = [classes_per_batch(block_order(starts, batch_size, 16, window, 1)) for window in (100, 400, 1600, 6400)]
    assert in_blocks == sorted(in_blocks)
    assert in_blocks[2] > 0.85 * permuted and in_blocks[3] > 0.95 * permuted  # windows of 16 and 64 blocks
