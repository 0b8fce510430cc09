"""Gradients and optimizers on process sets: the formulas of average_gradients with the set's ranks as all ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values
from helpers.pairwise import pairwise

import hvdkit as hk

opts = keras.optimizers
OVER_MPI = hk.cluster.exchange().over_mpi


@pytest.fixture(scope="module")
def sets():
    """Return this rank's sets: all ranks but the last or the last rank; even or odd ranks."""
    if not OVER_MPI:
        pytest.skip("under Gloo sets need HOROVOD_DYNAMIC_PROCESS_SETS=1")
    size = hk.size()
    listed = {
        "but last": range(max(1, size - 1)),
        "last": [size - 1],
        "even": range(0, size, 2),
        "odd": range(1, size, 2),
    }
    made = {name: hk.ProcessSet(list(ranks)) for name, ranks in listed.items() if list(ranks)}
    return {
        "uneven": made["but last"] if hk.rank() < size - 1 or size == 1 else made["last"],
        "by turns": made["even"] if hk.rank() % 2 == 0 else made["odd"],
    }


def gradients(rank):
    rng = np.random.default_rng(rank)
    dense = tf.constant(rng.normal(size=(40, 5)), tf.float32)
    tiny = tf.IndexedSlices(tf.constant(rng.normal(size=(4, 2)), tf.float32), [0, 2, 0, rank % 5], [5, 2])
    large = tf.IndexedSlices(tf.constant(rng.normal(size=(3, 4)), tf.float32), [7, 7, rank], [20_000, 4])
    return [dense, None, tiny, large]


def combined(ranks, op, weights=None):
    weights = weights or dict.fromkeys(ranks, 1.0)
    divisor = sum(weights[r] for r in ranks) if op == hk.Average else 1.0
    each = [[None if g is None else tf.convert_to_tensor(g).numpy() for g in gradients(r)] for r in ranks]
    return [
        None if gs[0] is None else sum(weights[r] * g for r, g in zip(ranks, gs, strict=True)) / divisor
        for gs in zip(*each, strict=True)
    ]


def assert_equal(found, expected, tolerance=1e-5):
    for mine, theirs in zip(found, expected, strict=True):
        if theirs is None:
            assert mine is None
            continue
        np.testing.assert_allclose(tf.convert_to_tensor(mine), theirs, rtol=tolerance, atol=tolerance)


@pairwise(
    ranks=(3, 4),
    which=["uneven", "by turns"],
    op=[hk.Average, hk.Sum],
    weighted=[False, True],
    compression=[None, "fp16", "bf16"],
    mode=["eager", "graph"],
    by=["average", "tape"],
)
def test_gradients_are_combined_within_a_set(which, op, weighted, compression, mode, by, sets, rank):
    one = sets[which]
    weights = {r: r + 1.0 for r in one.ranks} if weighted else None
    options = {"op": op, "weight": weights and weights[rank], "compression": compression, "process_set": one}

    def call():
        if by == "average":
            return hk.average_gradients(gradients(rank), **options)
        variables = [
            None if g is None else tf.Variable(tf.zeros_like(tf.convert_to_tensor(g))) for g in gradients(rank)
        ]
        with hk.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            pairs = zip(gradients(rank), variables, strict=True)
            loss = tf.add_n([tf.reduce_sum(v * tf.convert_to_tensor(g)) for g, v in pairs if g is not None])
        found = tape.gradient(loss, [v for v in variables if v is not None])
        return [found[0], None, *found[1:]]

    if mode == "graph" and by == "average":
        call = tf.function(call, autograph=False)
    assert_equal(call(), combined(one.ranks, op, weights), {None: 1e-5, "fp16": 1e-2, "bf16": 5e-2}[compression])


@pairwise(
    ranks=(3, 4),
    which=["uneven", "by turns"],
    make=["sgd", "adam", "scaled"],
    op=[hk.Average, hk.Sum],
    accumulate=[1, 2],
    clip=[None, 0.5],
)
def test_optimizers_of_sets_train_apart(which, make, op, accumulate, clip, sets, rank):
    one, scale = sets[which], 4.0 if make == "scaled" else 1.0
    makers = {
        "sgd": lambda: opts.SGD(0.1, momentum=0.9),
        "adam": lambda: opts.Adam(0.1),
        "scaled": lambda: opts.LossScaleOptimizer(opts.SGD(0.1, momentum=0.9), initial_scale=4.0),
    }
    optimizer = hk.DistributedOptimizer(
        makers[make](), op=op, accumulate_steps=accumulate, clip_global_norm=clip, process_set=one
    )
    plain = makers["sgd" if make == "scaled" else make]()
    ours, theirs = ([keras.Variable(np.ones((40, 5), "f4")), keras.Variable(np.ones((5, 2), "f4"))] for _ in range(2))
    expected = combined(one.ranks, op)
    wanted = [expected[0], expected[2]]
    if op == hk.Sum:
        wanted = [g * accumulate for g in wanted]
    if clip:
        wanted, _ = tf.clip_by_global_norm(wanted, clip)
    for _ in range(2):
        for _ in range(accumulate):
            dense, _, tiny, _ = gradients(rank)
            optimizer.apply([dense * scale, tf.convert_to_tensor(tiny) * scale], ours)
        plain.apply([tf.constant(g) for g in wanted], theirs)
    same_values(ours, theirs, rtol=2e-5, atol=2e-6)
    assert len({v.tobytes() for v in hk.allgather(ours[0].numpy()[None], process_set=one)}) == 1


@pytest.mark.core
def test_an_overflow_concerns_its_set_alone(sets, rank, size):
    one, variable = sets["by turns"], keras.Variable([1.0])
    optimizer = hk.DistributedOptimizer(opts.LossScaleOptimizer(opts.SGD(1.0), initial_scale=2.0), process_set=one)
    optimizer.apply([tf.fill([1], np.inf if rank == 0 else 2.0)], [variable])
    assert float(variable.numpy()[0]) == (1.0 if 0 in one.ranks else 0.0)


def test_local_variables_in_a_set(sets, rank):
    one, shared, own = sets["by turns"], keras.Variable([0.0]), keras.Variable([0.0])
    hk.register_local_variables(own)
    optimizer = hk.DistributedOptimizer(opts.SGD(1.0), process_set=one, clip_global_norm=1e6)
    optimizer.apply([tf.fill([1], rank + 1.0)] * 2, [shared, own])
    np.testing.assert_allclose(own, [-(rank + 1) / len(one.ranks)], rtol=1e-6)
    np.testing.assert_allclose(shared, [-(np.mean(one.ranks) + 1)], rtol=1e-6)


def test_an_axis_of_the_mesh_is_a_set(rank, size):
    (found,) = hk.average_gradients([tf.constant(float(rank))], process_set="data")
    assert float(found) == pytest.approx((size - 1) / 2)


def test_what_does_not_go_with_sets(sets, rank, size, tmp_path):
    one = sets["uneven"]
    with pytest.raises(TypeError, match="process_set: got"):
        hk.average_gradients([tf.ones([1])], process_set=3)
    with pytest.raises(ValueError, match="None with shard_states=True"):
        hk.DistributedOptimizer(opts.Adam(0.1), shard_states=True, process_set=one)
    table = hk.layers.ShardedEmbedding(5, 2)
    table.build()
    with pytest.raises(ValueError, match=r"process_set: got ranks .* all ranks with gradients of sharded variables"):
        hk.average_gradients([tf.zeros(v.shape) for v in table.weights], variables=table.weights, process_set=one)
    optimizer, variable = hk.DistributedOptimizer(opts.SGD(0.1), process_set=one), keras.Variable([1.0])
    with pytest.raises(ValueError, match=r"optimizer 'o'.*process_set=.*weights differ"):
        hk.checkpoint.save(tmp_path / "step-1", {"o": optimizer})
    if one.size() > 1:  # only ranks of the set see an error
        wrong = rank == one.ranks[-1]
        with pytest.raises(TypeError if wrong else hk.CollectiveMismatchError, match="got str"):
            optimizer.apply(["word" if wrong else tf.ones([1])], [variable])
    others = hk.ProcessSet([0])
    if rank > 0:
        with pytest.raises(ValueError, match="a set that contains the caller"):
            hk.DistributedOptimizer(opts.SGD(0.1), process_set=others)
