"""Mixtures: exact numbers of examples from each source, in one global order."""

import itertools
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from helpers.tiers import after_core
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdkit as hk
from hvdkit.data.mixtures import Proportions

WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@given(WEIGHTS, st.integers(0, 2**61))
@settings(deadline=None)
def test_each_source_has_its_part_of_the_first_places(weights, first):
    proportions = Proportions(weights)
    places = np.arange(first, first + 300)
    source, draws = proportions.draws(places)
    before = np.array(proportions.counts(first))
    for i in range(len(weights)):
        # Draws from a source are numbered without gaps.
        np.testing.assert_array_equal(draws[source == i], before[i] + np.arange((source == i).sum()))
    counts = proportions.counts(first + 300)
    np.testing.assert_array_equal(counts, before + np.bincount(source, minlength=len(weights)))
    assert sum(counts) == first + 300
    rounding = (first + 300) / 2**25  # of the weights
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - (first + 300) * Fraction(weight, sum(weights))) <= 2 + rounding


def write(folder, name, ids, rows_per_group=7):
    (folder / name).mkdir()
    for number, part in enumerate(np.array_split(ids, 3)):
        lists = [list(range(i % 4)) for i in part]
        table = pa.table({"id": part, "items": pa.array(lists, pa.list_(pa.int64()))})
        pq.write_table(table, folder / name / f"{number}.parquet", row_group_size=rows_per_group)
    return hk.data.parquet(folder / name)


@pytest.fixture
def sources(tmp_path):
    """Return sources of 100, 40 and 7 rows."""
    ends = np.cumsum([0, 100, 40, 7])
    return [write(tmp_path, f"{a}", np.arange(a, b)) for a, b in itertools.pairwise(ends)]


ORDERS = [
    {},
    {"shuffle_seed": 3},
    {"shuffle_seed": 3, "shuffle": "blocks", "interleave": 4, "shuffle_buffer": 40},
    {"shuffle": "blocks", "interleave": 3},
]


@pytest.mark.parametrize("options", ORDERS)
def test_examples_of_a_source_are_drawn_equally_often(sources, options):
    mixed = hk.data.mixture(sources, [2, 1, 1], epoch_examples=96)
    batches = hk.data.GlobalBatches(mixed, 12, epochs=7, rank=0, size=1, **options)
    drawn = np.zeros(147, int)
    for step, batch in enumerate(batches):
        np.add.at(drawn, batch["id"], 1)
        assert batch["items"].to_list() == [list(range(i % 4)) for i in batch["id"]]
        if (step + 1) % 8 == 0:
            counts = [drawn[:100].sum(), drawn[100:140].sum(), drawn[140:].sum()]
            assert counts == mixed.counts((step + 1) * 12) == [(step + 1) * 6, (step + 1) * 3, (step + 1) * 3]
            for part in (drawn[:100], drawn[100:140], drawn[140:]):
                assert part.max() - part.min() <= 1


@pytest.mark.parametrize("options", after_core(ORDERS, but=ORDERS[2:3]))
def test_order_is_independent_of_ranks_and_resumes_at_others(sources, options):
    mixed = hk.data.mixture(sources, [0.6, 0.3, 0.1], epoch_examples=50)
    make = lambda rank, size: hk.data.GlobalBatches(mixed, 8, epochs=3, rank=rank, size=size, **options)  # noqa: E731
    whole = [batch["id"] for batch in make(0, 1)]
    assert len(whole) == 21
    for size in (2, 3, 4):
        ranks = [make(rank, size) for rank in range(size)]
        before = [np.concatenate([next(batches)["id"] for batches in ranks]) for _ in range(9)]
        np.testing.assert_array_equal(before, whole[:9])
        state = ranks[0].state
        after = [make(rank, 5 - size) for rank in range(5 - size)]
        for batches in after:
            batches.restore(state)
        rest = [np.concatenate([batch["id"] for batch in each]) for each in zip(*after, strict=True)]
        np.testing.assert_array_equal(rest, whole[9:])


@pytest.mark.full
def test_every_batch_has_about_the_right_part_of_each_source(sources):
    mixed = hk.data.mixture(sources[:2], [3, 1], epoch_examples=4800)
    for options in ORDERS:
        batches = hk.data.GlobalBatches(mixed, 48, epochs=1, rank=0, size=1, **options)
        counts = [(batch["id"] < 100).sum() for batch in batches]
        lanes = options.get("interleave", 1)
        assert max(abs(count - 36) for count in counts) <= 2 * lanes


def test_a_rank_reads_its_part_of_the_blocks_of_every_source(tmp_path):
    sources = [write(tmp_path, "a", np.arange(3000), 25), write(tmp_path, "b", np.arange(3000, 5400), 25)]
    mixed = hk.data.mixture(sources, [30, 24])
    for rank in range(4):
        batches = hk.data.GlobalBatches(
            mixed, 40, shuffle_seed=1, shuffle="blocks", interleave=8, shuffle_buffer=400, epochs=1, rank=rank, size=4
        )
        blocks = np.unique(np.concatenate([batch["id"] for batch in batches]) // 25)
        assert len(blocks) * 25 <= 5400 / 4 + 2 * 2 * 2 * 25  # two blocks more per lane and source


def test_arrays_can_be_mixed():
    pairs = [(np.arange(6), np.zeros(6)), (np.arange(6, 9), np.ones(3))]
    batches = hk.data.GlobalBatches(hk.data.mixture(pairs, [2, 1]), 3, shuffle_seed=0, epochs=1, rank=0, size=1)
    ids, labels = (np.concatenate(each) for each in zip(*batches, strict=True))
    assert sorted(ids) == list(range(9)) and labels.tolist() == [0, 1, 0] * 3
    with pytest.raises(TypeError, match="shuffle: got blocks, expected files"):
        hk.data.GlobalBatches(hk.data.mixture(pairs, [2, 1]), 3, shuffle="blocks", rank=0, size=1)


@pytest.mark.parametrize("convert", [lambda lists: lists.to_sparse(), lambda lists: lists.to_tensor(0, [None, 3])])
def test_tensors_can_be_mixed(sources, convert):
    maps = [each.map(lambda batch: (batch["id"], convert(batch["items"]))) for each in sources[:2]]
    batches = hk.data.GlobalBatches(hk.data.mixture(maps, [1, 1]), 16, epochs=1, rank=0, size=1, remainder="drop")
    for ids, items in batches:
        dense = tf.sparse.to_dense(items) if isinstance(items, tf.SparseTensor) else items
        expected = [[k if k < i % 4 else 0 for k in range(3)] for i in ids.tolist()]
        np.testing.assert_array_equal(dense, np.array(expected)[:, : dense.shape[1]])
        assert (ids < 100).any() and (ids >= 100).any()


def test_invalid_mixtures_are_refused(sources):
    for weights in ([1, 2], [1, 2, 0], [1, 2, -1], [1, 2, float("nan")]):
        with pytest.raises(ValueError, match="weights: got"):
            hk.data.mixture(sources, weights)
    with pytest.raises(ValueError, match=r"sources\[1\]: got batches of .*expected .* as of sources\[0\]"):
        hk.data.mixture([sources[0], sources[1].map(lambda batch: batch["id"])], [1, 1])
    with pytest.raises(ValueError, match="epoch_examples: got 0"):
        hk.data.mixture(sources, [1, 1, 1], epoch_examples=0)
    state = hk.data.GlobalBatches(hk.data.mixture(sources, [1, 1, 1]), 8, rank=0, size=1).state
    other = hk.data.GlobalBatches(hk.data.mixture(sources, [1, 1, 2]), 8, rank=0, size=1)
    with pytest.raises(ValueError, match=r"state\['weights'\]: got"):
        other.restore(state)
