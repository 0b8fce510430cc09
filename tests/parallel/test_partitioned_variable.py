"""``hk.PartitionedVariable`` against plain NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers.pairwise import printed

import hvdkit as hk

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.core(2)]

PARTITIONS = ["div", "mod"]


@pytest.fixture(params=PARTITIONS)
def partition(request):
    return request.param


def ids_of(rank, rows, count=7):
    return np.random.default_rng(rank).integers(0, rows, size=(count * rank, 2))


def test_its_parts_are_the_whole(partition, rank, size):
    for rows, tail in printed([(0, (3,)), (1, ()), (5, (2, 3)), (13, (3,))]):
        variable = hk.PartitionedVariable((rows, *tail), initializer="uniform", partition=partition, seed=4)
        whole = variable.gather()
        assert whole.shape == variable.shape == (rows, *tail)
        held = variable.local_rows
        np.testing.assert_array_equal(variable.local, whole[held.start : held.stop : held.step])
        assert sorted(row for rows in hk.allgather_object(list(held)) for row in rows) == list(range(rows))
        for root in range(size):
            there = variable.gather(root)
            assert (there is None) == (rank != root)
            assert there is None or (there == whole).all()


def test_first_values_depend_on_the_seed_and_not_on_the_ranks(partition):
    from hvdkit.sharding.initial import initial_blocks

    for initializer in ("uniform", "normal", "truncated_normal", "glorot_uniform", "ones", 3):
        made = hk.PartitionedVariable((40, 9), initializer=initializer, partition=partition, seed=11).gather()
        alone = [b for _, b in initial_blocks(initializer, (40, 9), "float32", 11, (range(40), range(9)))]
        np.testing.assert_array_equal(made, np.concatenate(alone))
    other = hk.PartitionedVariable((40, 9), initializer="ones", partition=partition, seed=12).gather()
    assert (other == 1).all()
    given = np.arange(36.0).reshape(12, 3)
    np.testing.assert_array_equal(hk.PartitionedVariable((12, 3), initializer=given).gather(), given)
    unseeded = hk.PartitionedVariable((50, 4), initializer="uniform", partition=partition).gather()
    assert len(np.unique(unseeded)) > 190 and len(set(hk.allgather_object(unseeded.tobytes()))) == 1


@pytest.mark.parametrize(
    ("partition", "dtype", "traced"),
    [("div", "float32", False), ("mod", "float64", True), ("div", "bfloat16", True), ("mod", "int32", False)],
)
def test_lookup_equals_indexing(partition, traced, dtype, rank):
    variable = hk.PartitionedVariable((13, 3), dtype, np.arange(39).reshape(13, 3), partition=partition)
    whole = np.arange(39).reshape(13, 3)
    lookup = tf.function(variable.lookup) if traced else variable.lookup
    for ids in (ids_of(rank, 13), np.int32(5), np.zeros((0, 4), np.int64), np.full((50,), rank % 13, np.uint8)):
        found = lookup(tf.constant(ids))
        assert found.dtype == variable.dtype
        np.testing.assert_array_equal(tf.cast(found, tf.float64), whole[ids])


def test_gradients_are_summed_over_ranks_and_duplicates(partition, rank, size):
    variable = hk.PartitionedVariable((13, 3), "float64", "uniform", partition=partition, seed=1)
    whole, held = variable.gather(), variable.local_rows
    with tf.GradientTape() as tape:
        loss = (rank + 1.0) * tf.reduce_sum(tf.square(variable.lookup(ids_of(rank, 13))))
    gradient = tf.convert_to_tensor(tape.gradient(loss, variable.local))
    expected = np.zeros((13, 3))
    for r in range(size):
        np.add.at(expected, ids_of(r, 13), 2 * (r + 1.0) * whole[ids_of(r, 13)])
    np.testing.assert_allclose(gradient, expected[held.start : held.stop : held.step], rtol=1e-12)


def test_rows_are_assigned_wherever_they_are(partition, rank, size):
    variable = hk.PartitionedVariable((9, 2), partition=partition)
    expected = np.zeros((9, 2))
    variable.assign(np.arange(18).reshape(9, 2))
    expected[:] = np.arange(18).reshape(9, 2)
    variable.assign_rows([rank, rank, 8], [[1.0, 1.0], [2.0, rank], [3.0, rank]])
    for r in range(size):  # the last of two values, and the highest rank's
        expected[[r, 8]] = [[2.0, r], [3.0, r]]
    np.testing.assert_array_equal(variable.gather(), expected)
    variable.assign_rows(*(([4], [[7.0, 7.0]]) if rank == size - 1 else ([], [])))
    expected[4] = 7
    variable.apply(lambda rows: rows * 2 + 1)
    np.testing.assert_array_equal(variable.gather(), expected * 2 + 1)


@pytest.mark.parametrize(
    ("partition", "bad", "traced"), [("div", 13, False), ("mod", 13, True), ("mod", -1, False), ("div", 2**40, True)]
)
def test_an_id_out_of_range_is_an_error_on_every_rank(partition, bad, traced, rank, size):
    variable = hk.PartitionedVariable((13, 3), partition=partition, name="table")
    lookup = tf.function(variable.lookup) if traced else variable.lookup
    ids = tf.constant([1, bad if rank == size - 1 else 2], tf.int64)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as error:
        lookup(ids)
    assert f"got {bad} in lookup of" in str(error.value) and f"on rank {size - 1}" in str(error.value)
    assert "expected 0 to 12" in str(error.value) and "out_of_range=" not in str(error.value)
    assert lookup(tf.constant([0, 12], tf.int64)).shape == (2, 3)  # every rank has returned


def test_bad_arguments_name_themselves(rank, size):
    for arguments, error, words in (
        (((),), ValueError, "at least one axis"),
        (((3, -1),), ValueError, "shape: got -1"),
        (((3,), "string"), TypeError, "dtype: got string"),
        (((3,), "float32", "no such"), TypeError, "initializer: got no such"),
        (((3,), "float32", np.zeros(4)), ValueError, "initializer: got values"),
    ):
        with pytest.raises(error, match=words.replace("[", r"\[")):
            hk.PartitionedVariable(*arguments)
    with pytest.raises(ValueError, match="partition: got rows"):
        hk.PartitionedVariable((3,), partition="rows")
    variable = hk.PartitionedVariable((3, 2), name="v")
    with pytest.raises(TypeError, match="ids of 'v': got float32"):
        variable.lookup([1.0])
    with pytest.raises(ValueError, match="full_array"):
        variable.assign(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="fn: got a result of shape"):
        variable.apply(lambda rows: tf.zeros([1, 7]))
    with pytest.raises(ValueError, match="root"):
        variable.gather(root=size)
    with pytest.raises((ValueError, hk.CollectiveMismatchError), match="ids: got 3 to 3"):
        variable.assign_rows([3] if rank == 0 else [1], [[0.0, 0.0]])


@pytest.mark.ranks(2, 3)
def test_ranks_that_differ_are_named(rank, size):
    words = rf"got PartitionedVariable\(.*'mod'.*\) on rank {size - 1}, expected"
    with pytest.raises(hk.CollectiveMismatchError, match=words):
        hk.PartitionedVariable((4, 2), partition="mod" if rank == size - 1 else "div")


def test_ids_that_one_rank_cannot_use_are_an_error_on_all(rank, size):
    table = hk.PartitionedVariable((5, 2), initializer="ones")
    said = "got float32, expected integers" if rank == 0 else "rank 0 rejected its inputs"
    with pytest.raises((TypeError, ValueError), match=said):
        table.lookup([0.5] if rank == 0 else [1])
    assert table.lookup([1]).shape == (1, 2)
