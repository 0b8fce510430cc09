"""What users of ``keras.layers.Embedding`` are used to: the same result as in one process, or a clear error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import mine
from helpers.jobs import call, environment
from helpers.pairwise import printed

import hvdkit as hk

ROWS, WIDTH, BATCH = 11, 4, 12
Table = hk.layers.Table


def data(many=BATCH):
    rng = np.random.default_rng(4)
    return rng.integers(0, ROWS, (many, 3)), rng.normal(size=(many, 1)).astype("f4")


# ---- Sequential without Input ---------------------------------------------------------------------------------


def sequential(embedding):
    return keras.Sequential([embedding, keras.layers.Flatten(), keras.layers.Dense(1, kernel_initializer="ones")])


@pytest.mark.core(2)
@pytest.mark.ranks(1, 2)
def test_a_sequential_without_input_equals_keras(rank, size):
    """Call, fit, evaluate and predict: Keras converts the ids to float32."""
    ids, y = data()
    layer, plain = hk.layers.ShardedEmbedding(ROWS, WIDTH, seed=1), keras.layers.Embedding(ROWS, WIDTH)
    model, alone = sequential(layer), sequential(plain)
    own_ids, own_y = mine(ids, rank, size), mine(y, rank, size)
    model(tf.constant(own_ids)), alone(tf.constant(ids))
    plain.set_weights(layer.get_weights())
    model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse", jit_compile=False)
    alone.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    model.fit(own_ids, own_y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    alone.fit(ids, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    np.testing.assert_allclose(layer.get_weights()[0], plain.get_weights()[0], rtol=1e-4, atol=1e-6)
    expected = alone.predict(own_ids, verbose=0)
    np.testing.assert_allclose(model.predict(own_ids, verbose=0), expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(model.evaluate(own_ids, own_y, verbose=0))
    assert model.compute_output_shape((None, 3)) == (None, 1)
    for dtype in ("int32", "uint8", "float32", "float64"):
        np.testing.assert_allclose(model(tf.constant(own_ids, dtype)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("bad", "said", "traced"),
    [(1.5, "ids, without their fraction: got 1", True), (np.nan, "ids", False), (11.0, "got 11", False)],
)
def test_floats_that_are_no_rows_are_an_error_on_every_rank(bad, said, traced, rank, size):
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH)
    layer.build()
    ids = tf.constant([[2.0, bad if rank == size - 1 else 3.0]])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=f"{said}.* on rank {size - 1}"):
        (tf.function(layer) if traced else layer)(ids)
    if bad != 11:
        with pytest.raises(ValueError, match="without their fraction"):
            hk.layers.ShardedEmbedding(ROWS, WIDTH, out_of_range="drop")(ids)


# ---- mask_zero ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["pooling", pytest.param("recurrent", marks=pytest.mark.nightly)])
def test_mask_zero_equals_keras(after, rank, size):
    """Id 0 is padding: the layers after the embedding mask it, forward and backward."""
    ids, y = data()
    ids *= np.random.default_rng(1).integers(0, 2, ids.shape)
    ids[:, 0] += ids[:, 0] == 0
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, mask_zero=True, seed=1)
    plain = keras.layers.Embedding(ROWS, WIDTH, mask_zero=True)

    def build(embedding):
        keras.utils.set_random_seed(3)
        inner = keras.layers.GlobalAveragePooling1D() if after == "pooling" else keras.layers.SimpleRNN(3)
        model = keras.Sequential([keras.Input((3,), dtype="int64"), embedding, inner, keras.layers.Dense(1)])
        return model

    model, alone = build(layer), build(plain)
    plain.set_weights(layer.get_weights())
    np.testing.assert_array_equal(layer(tf.constant(ids))._keras_mask, ids != 0)
    model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse", jit_compile=False)
    alone.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    model.train_on_batch(mine(ids, rank, size), mine(y, rank, size))
    alone.train_on_batch(ids, y)
    np.testing.assert_allclose(layer.get_weights()[0], plain.get_weights()[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.predict(ids, verbose=0), alone.predict(ids, verbose=0), rtol=1e-4, atol=1e-5)


# ---- regularizers, and what has no counterpart ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("partition", "regularizer", "op"),
    [
        ("mod", "l2", hk.Average),
        ("column", keras.regularizers.L1L2(0.01, 0.05), hk.Sum),
        pytest.param("replicated", "l1", hk.Average, marks=pytest.mark.nightly),
    ],
)
def test_a_regularizer_equals_keras(partition, regularizer, op, rank, size):
    """The penalty covers the whole table, once, on every rank: in the loss, and in each row's gradient."""
    ids, y = data()
    options = {"embeddings_regularizer": regularizer}
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, partition=partition, seed=1, **options)
    plain = keras.layers.Embedding(ROWS, WIDTH, **options)
    model, alone = sequential(layer), sequential(plain)
    model(ids), alone(ids)
    plain.set_weights(layer.get_weights())
    np.testing.assert_allclose(float(sum(layer.losses)), float(sum(plain.losses)), rtol=1e-5)
    rate = 0.5 / (size if op == hk.Sum else 1)
    model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(rate), op=op), "mse", jit_compile=False)
    alone.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    for _ in range(2):
        loss = model.train_on_batch(mine(ids, rank, size), mine(y, rank, size))
        expected = alone.train_on_batch(ids, y)
    np.testing.assert_allclose(layer.get_weights()[0], plain.get_weights()[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(hk.allreduce(float(loss)), float(expected), rtol=1e-5)


def test_a_regularizer_beside_batches_of_unlike_sizes(rank, size):
    """The penalty's gradient does not depend on the distribution of examples, and is added once for two lookups."""
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, embeddings_regularizer="l2", seed=1, dtype="float64")
    layer.build()
    start = layer.gather()
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=None)
    optimizer.build(layer.trainable_variables)
    ids = np.full(rank + (size == 1), 3)  # the first of several ranks has none

    class Twice(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def call(self, ids):
            return self.inner(ids) + self.inner(ids)

    twice = Twice()

    def step(ids):
        with hk.DistributedGradientTape(tf.GradientTape(), weight=tf.shape(ids)[0]) as tape:
            found = twice(ids)
            loss = tf.reduce_sum(found) / tf.cast(tf.maximum(tf.shape(ids)[0], 1), tf.float64) + sum(twice.losses)
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)

    tf.function(step)(tf.constant(ids))
    expected = start - 2 * np.float64(keras.regularizers.L2().l2) * start
    expected[3] -= 2.0
    np.testing.assert_allclose(layer.gather(), expected, rtol=1e-6)


# ---- get_weights and set_weights ------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("partition", ["mod", "div", "column", "replicated"])
def test_weights_are_the_whole_table_in_and_out(partition, rank, size, shared_path):
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, partition=partition)
    table = np.random.default_rng(2).normal(size=(ROWS, WIDTH)).astype("f4")
    layer.set_weights([table])  # builds the layer
    (found,) = layer.get_weights()
    np.testing.assert_array_equal(found, table)
    np.testing.assert_array_equal(layer(tf.constant([3, rank])), table[[3, rank]])
    if hk.is_chief():
        np.save(shared_path / "table.npy", table[::-1])
    hk.barrier()
    layer.set_weights([np.load(shared_path / "table.npy", mmap_mode="r")])
    np.testing.assert_array_equal(layer.get_weights()[0], table[::-1])


def test_weights_of_a_collection_are_in_the_order_of_its_tables(rank, size):
    tables = [Table("z", 4, 2), Table("a", 30, 3), Table("m", 5, 2)]
    layer = hk.layers.ShardedEmbeddingCollection(tables, {"z": "row", "a": "column", "m": "table"})
    given = [np.random.default_rng(i).normal(size=(t.input_dim, t.output_dim)) for i, t in enumerate(tables)]
    layer.set_weights(given)
    for found, expected in zip(layer.get_weights(), given, strict=True):
        np.testing.assert_array_equal(found, expected.astype("f4"))
    with pytest.raises(ValueError, match=r"get_weights: got table 'e' with evict"):
        hk.layers.ShardedEmbeddingCollection([Table("e", 4, 2, evict="lru")]).get_weights()


def test_weights_that_do_not_fit_are_an_error_on_every_rank(rank, size):
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH)
    before, good = layer.get_weights()[0], np.zeros((ROWS, WIDTH))
    for bad, said in printed(
        [([good.T], r"full_array: got shape \[4, 11\]"), ([good, good], "weights: got 2 arrays, expected 1")]
    ):
        with pytest.raises((ValueError, hk.CollectiveMismatchError), match=said):
            layer.set_weights([good] if rank < size - 1 else bad)
        np.testing.assert_array_equal(layer.get_weights()[0], before)  # on no rank


# ---- serialization and Keras's files --------------------------------------------------------------------------


def model_of_all_kinds(plan):
    tables = [
        Table("item", 40, 6, features=("item", "user/last")),
        Table("tags", 9, 6, combiner="mean"),
        Table("small", 3, 2),
        Table("words", 64, 4, evict="lru"),
    ]
    given = {
        name: keras.Input((2,) if name == "tags" else (), dtype="int64") for name in ("item", "tags", "small", "words")
    }
    given["user"] = {"last": keras.Input((), dtype="int64")}
    found = hk.layers.ShardedEmbeddingCollection(tables, plan, seed=1, name="embed")(given)
    joined = keras.layers.Concatenate()(
        [*(found[n] for n in ("item", "tags", "small", "words")), found["user"]["last"]]
    )
    return keras.Model(given, hk.layers.ColumnParallelDense(3, seed=2, name="dense")(joined))


def ids_of_all_kinds():
    rng = np.random.default_rng(0)
    ids = {"item": rng.integers(0, 40, 5), "tags": rng.integers(0, 9, (5, 2)), "small": rng.integers(0, 3, 5)}
    return {**ids, "words": rng.integers(-9, 9, 5), "user": {"last": rng.integers(0, 40, 5)}}


PLAN = {"item": "row", "tags": "column", "small": "replicated", "words": "row"}


@pytest.fixture
def written_by_one_process(shared_path):
    """Return a .keras file and a .weights.h5 file written by one process, and its model's predictions."""
    if hk.is_chief():
        code = (
            "import sys, hvdkit as hk; hk.init()\n"
            "import numpy as np\n"
            "from test_embedding_keras import *\n"
            "model, ids = model_of_all_kinds(PLAN), ids_of_all_kinds()\n"
            "model(ids, training=True)\n"  # words get rows
            "model.save(sys.argv[1] + '/model.keras'); model.save_weights(sys.argv[1] + '/model.weights.h5')\n"
            "np.save(sys.argv[1] + '/predicted.npy', model.predict(ids, verbose=0))\n"
        )
        env = environment(PYTHONPATH=os.pathsep.join(map(str, Path(__file__).parents[:2])))
        done = call([sys.executable, "-c", code, shared_path], env=env)
        assert done.returncode == 0, done.stdout + done.stderr
    hk.barrier()
    return shared_path


@pytest.mark.nightly
def test_a_file_that_one_process_wrote_is_read_at_any_number_of_ranks(written_by_one_process, rank, size):
    """Each rank reads its shard of every table, of the ids that have rows, and all weights of dense layers."""
    expected = np.load(written_by_one_process / "predicted.npy")
    loaded = keras.models.load_model(written_by_one_process / "model.keras")
    other = model_of_all_kinds({"item": "column", "tags": "table", "small": "row"})
    other.load_weights(written_by_one_process / "model.weights.h5")
    for model in (loaded, other):
        np.testing.assert_allclose(model.predict(ids_of_all_kinds(), verbose=0), expected, rtol=1e-5, atol=1e-7)


def test_a_file_is_refused_if_it_would_hold_one_ranks_part(rank, size, shared_path):
    cut = keras.Sequential([keras.Input((2,), dtype="int64"), hk.layers.ShardedEmbedding(ROWS, WIDTH)])
    whole = keras.Sequential(
        [keras.Input((2,), dtype="int64"), hk.layers.ShardedEmbedding(ROWS, WIDTH, partition="replicated", seed=1)]
    )
    path = shared_path / f"rank-{rank}.keras"
    whole.save(path)
    loaded = keras.models.load_model(path)
    np.testing.assert_array_equal(loaded.layers[0].get_weights()[0], whole.layers[0].get_weights()[0])
    if size > 1:
        for save in (lambda: cut.save(path), lambda: cut.save_weights(shared_path / f"rank-{rank}.weights.h5")):
            with pytest.raises(hk.HvdkitError, match=f"sharded across {size} ranks, .*or hk.Supervisor"):
                save()
