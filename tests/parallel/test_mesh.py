"""Layers sharded along one mesh axis, batches along the other: equal to Keras's layers in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values

import hvdkit as hk
from hvdkit import cluster
from hvdkit.sharding.partition import rows_of

BATCH, INPUTS, HIDDEN, WORDS, STEPS = 6, 5, 7, 11, 3
MESHES = {
    1: [{"model": 1}],
    2: [{"model": 2}, {"data": 2}],
    3: [{"model": 3}],
    4: [{"data": 2, "model": 2}, {"model": 4}],
}


@pytest.fixture(scope="module", params=MESHES[hk.size()], ids=str)
def mesh(request):
    """Reinitialize with a mesh, and afterwards without one."""
    hk.shutdown()
    hk.init(mesh=request.param)
    yield request.param
    hk.shutdown()
    hk.init()


def data_of(step, batches):
    """Return the global batch of a step, and this rank's part of it."""
    rng = np.random.default_rng(step)
    x, words = rng.normal(size=(BATCH * batches, INPUTS)).astype("f4"), rng.integers(0, WORDS, BATCH * batches)
    along = cluster.group("data")
    mine = slice(BATCH * along.index, BATCH * (along.index + 1))
    return (x, words), (x[mine], words[mine])


def held(extent):
    group = cluster.group("model")
    rows = rows_of("div", extent, group.index, group.size)
    return slice(rows.start, rows.stop)


def sharded(uneven=True):
    seeds = (keras.initializers.GlorotUniform(seed=s) for s in (1, 2, 3))
    first = hk.layers.ColumnParallelDense(HIDDEN, activation="tanh", kernel_initializer=next(seeds))
    second = hk.layers.RowParallelDense(INPUTS, kernel_initializer=next(seeds))
    words = hk.layers.ColumnParallelDense(WORDS, kernel_initializer=next(seeds))
    scale = keras.Variable(np.ones(INPUTS, "f4"), name="scale")
    return [first, second, words], scale


def whole():
    seeds = (keras.initializers.GlorotUniform(seed=s) for s in (1, 2, 3))
    first = keras.layers.Dense(HIDDEN, "tanh", kernel_initializer=next(seeds))
    second = keras.layers.Dense(INPUTS, kernel_initializer=next(seeds))
    words = keras.layers.Dense(WORDS, kernel_initializer=next(seeds))
    return [first, second, words], keras.Variable(np.ones(INPUTS, "f4"), name="scale")


def forward(layers, scale, x):
    first, second, words = layers
    return words(second(first(x * scale)))


def trained(make, optimizer, loss_of, batches):
    layers, scale = make()
    forward(layers, scale, batches[0][0])
    variables = [scale, *(v for layer in layers for v in layer.trainable_variables)]

    @tf.function
    def step(x, words):
        with tf.GradientTape() as tape:
            loss = loss_of(words, forward(layers, scale, x))
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    losses = [float(step(tf.constant(x), tf.constant(w))) for x, w in batches]
    return layers, scale, losses


def parallel_loss(words, logits):
    return tf.reduce_mean(hk.layers.vocabulary_parallel_cross_entropy(words, logits, WORDS))


def plain_loss(words, logits):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=words, logits=logits))


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(lambda: keras.optimizers.SGD(0.2, momentum=0.9), {"clip_global_norm": 0.1}, id="momentum-clip"),
        pytest.param(lambda: keras.optimizers.Adam(0.02), {"shard_states": True}, id="adam-sharded"),
        pytest.param(lambda: keras.optimizers.Adagrad(0.1), {}, id="adagrad", marks=pytest.mark.nightly),
        pytest.param(
            lambda: keras.optimizers.Ftrl(0.1), {"shard_states": True}, id="ftrl-sharded", marks=pytest.mark.nightly
        ),
        pytest.param(
            lambda: keras.optimizers.SGD(0.1),
            {"op": hk.Sum, "clip_global_norm": 0.1, "shard_states": True},
            id="sum-clip-sharded",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_training_equals_one_process(mesh, make, options):
    batches = cluster.group("data").size
    steps = [data_of(step, batches) for step in range(STEPS)]
    layers, scale, losses = trained(
        sharded, hk.DistributedOptimizer(make(), **options), parallel_loss, [own for _, own in steps]
    )
    loss = plain_loss if options.get("op") != hk.Sum else lambda w, z: batches * plain_loss(w, z)
    alone = make()
    if "clip_global_norm" in options:
        alone = keras.optimizers.SGD(
            float(alone.learning_rate), momentum=alone.momentum, global_clipnorm=options["clip_global_norm"]
        )
    theirs, their_scale, expected = trained(whole, alone, loss, [both for both, _ in steps])
    np.testing.assert_allclose(scale, their_scale, rtol=2e-4, atol=1e-6)
    for layer, other, axis in zip(layers, theirs, (1, 0, 1), strict=True):
        cut = held(other.kernel.shape[axis])
        kernel = other.kernel.numpy()[:, cut] if axis else other.kernel.numpy()[cut]
        np.testing.assert_allclose(layer.kernel, kernel, rtol=2e-4, atol=2e-6)
        bias = other.bias.numpy()[cut] if axis else other.bias.numpy()
        np.testing.assert_allclose(layer.bias, bias, rtol=2e-4, atol=2e-6)
    if options.get("op") != hk.Sum:
        means = np.mean(hk.allgather_object(losses), axis=0)
        np.testing.assert_allclose(means, expected, rtol=1e-4)


def test_outputs_are_gathered_and_inputs_cut_when_asked(mesh):
    x = np.random.default_rng(4).normal(size=(3, 2, INPUTS)).astype("f4")
    column = hk.layers.ColumnParallelDense(HIDDEN, gather_output=True, seed=5)
    row = hk.layers.RowParallelDense(4, input_is_parallel=False, seed=6)
    seeded = [keras.initializers.GlorotUniform(seed=seed) for seed in (5, 6)]
    plain = [keras.layers.Dense(n, kernel_initializer=i) for n, i in zip((HIDDEN, 4), seeded, strict=True)]
    np.testing.assert_allclose(column(x), plain[0](x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(row(plain[0](x)), plain[1](plain[0](x)), rtol=1e-5, atol=1e-6)
    given = tf.constant(x)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(given)
        ours, theirs = tf.reduce_sum(tf.square(row(column(given)))), tf.reduce_sum(tf.square(plain[1](plain[0](given))))
    np.testing.assert_allclose(tape.gradient(ours, given), tape.gradient(theirs, given), rtol=1e-4, atol=1e-5)


@pytest.mark.core(2, 4)
@pytest.mark.ranks(1, 2, 3, 4)
def test_batches_differ_along_the_data_axis_only(mesh):
    batches = hk.data.GlobalBatches(np.arange(24), 8, epochs=1)
    along = cluster.group("data")
    start, stop = (8 * (along.index + i) // along.size for i in range(2))
    np.testing.assert_array_equal(next(iter(batches)), np.arange(8)[start:stop])


@pytest.mark.ranks(1, 2, 3, 4)
def test_parts_are_saved_once_and_restored(mesh, shared_path):
    layers, scale = sharded()
    forward(layers, scale, np.zeros((1, INPUTS), "f4"))
    optimizer = hk.DistributedOptimizer(keras.optimizers.Adam())
    optimizer.build([v for layer in layers for v in layer.trainable_variables])
    path = hk.checkpoint.save(shared_path / "step-1", {"layers": layers, "optimizer": optimizer})
    before = [v.numpy() for layer in layers for v in layer.variables]
    for layer in layers:
        for variable in layer.variables:
            variable.assign(tf.zeros_like(variable))
    hk.checkpoint.restore(path, {"layers": layers, "optimizer": optimizer})
    same_values((v for layer in layers for v in layer.variables), before)
    hk.checkpoint.verify(path)


def test_labels_out_of_range_and_wrong_shapes(mesh):
    logits = tf.zeros([2, len(range(WORDS)[held(WORDS)])])
    loss = hk.layers.vocabulary_parallel_cross_entropy([0, WORDS], logits, WORDS).numpy()
    assert loss[0] == pytest.approx(np.log(WORDS)) and np.isnan(loss[1])
    with pytest.raises(ValueError, match="logits: got shape"):
        hk.layers.vocabulary_parallel_cross_entropy([0], tf.zeros([1, WORDS + 1]), WORDS)
    with pytest.raises(ValueError, match="axis: got data"):
        hk.layers.ColumnParallelDense(3, axis="data")
    with pytest.raises(ValueError, match="units: got 0"):
        hk.layers.RowParallelDense(0)
