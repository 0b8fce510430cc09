"""The gradients of sharded tables: N ranks equal one process with the whole table."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.pairwise import some_at

import hvdkit as hk
from hvdkit.sharding.id_checks import find_fault
from hvdkit.sharding.routing import KeptLookup, KeyedVariable, RowsByRank, request_rows

ROWS, WIDTH, STEPS = 17, 6, 2
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.8),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.8, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.2),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "amsgrad": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.02, momentum=0.5, centered=True),
    "ftrl": lambda: keras.optimizers.Ftrl(
        0.2, l1_regularization_strength=0.01, l2_shrinkage_regularization_strength=0.1
    ),
    "adamax": lambda: keras.optimizers.Adamax(0.05),
}
COMBINERS = [None, "sum", "mean", "sqrtn"]


def batch(step, rank, examples):
    """Return the ids, many of them repeated, and the targets of one rank's step."""
    rng = np.random.default_rng([step, rank])
    ids = np.minimum(rng.zipf(1.3, size=(examples, 3)) - 1, ROWS - 1)
    return ids, rng.normal(size=(examples, WIDTH))


def loss_of(vectors, targets, combiner):
    vectors = tf.cast(vectors, tf.float64)
    if combiner is None:
        targets = targets[:, None]
    return tf.reduce_mean(tf.square(vectors - targets)) if vectors.shape[0] else tf.reduce_sum(vectors)


def reference_lookup(table, ids, combiner):
    rows = tf.gather(table, ids)
    if combiner is None:
        return rows
    return tf.reduce_sum(rows, 1) / {"sum": 1, "mean": ids.shape[1], "sqrtn": ids.shape[1] ** 0.5}[combiner]


def reference(start, optimizer, combiner, batches, lazy, weights=None, clip=None):
    """Train the whole table in one process; ``lazy`` restores rows without ids in the batch."""
    table = keras.Variable(start)
    optimizer.build([table])
    for ranks in batches:
        share = np.array([len(ids) if weights else 1 for ids, _ in ranks], float)
        with tf.GradientTape() as tape:
            losses = [loss_of(reference_lookup(table.value, i, combiner), t, combiner) for i, t in ranks]
            total = tf.add_n([s * x for s, x in zip(share / share.sum(), losses, strict=True)])
        gradient = tf.convert_to_tensor(tape.gradient(total, table.value))
        if clip is not None:
            gradient = tf.clip_by_global_norm([gradient], clip)[0][0]
        state = [v for v in [table, *optimizer.variables] if tuple(v.shape) == tuple(table.shape)]
        before = [v.numpy() for v in state]
        optimizer.apply([gradient], [table])
        touched = np.unique(np.concatenate([i.ravel() for i, _ in ranks]))
        for variable, old in zip(state if lazy else [], before, strict=False):
            values = old.copy()
            values[touched] = variable.numpy()[touched]
            variable.assign(values)
    return table.numpy()


def train(layer, optimizer, combiner, batches, rank, traced=False):
    def step(ids, targets):
        with tf.GradientTape() as tape:
            loss = loss_of(layer(ids), targets, combiner)
        variables = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    run = tf.function(step, reduce_retracing=True) if traced else step
    optimizer.build(layer.trainable_variables)
    for ranks in batches:
        run(*(tf.constant(x) for x in ranks[rank]))


def all_batches(size, uneven):
    """Return each rank's batch for every step; with ``uneven``, rank r has r examples, so rank 0 has none."""
    return [[batch(s, r, r if uneven and size > 1 else 5) for r in range(size)] for s in range(STEPS)]


def layer_of(partition, combiner, **options):
    layer = hk.layers.ShardedEmbedding(
        ROWS, WIDTH, combiner=combiner, partition=partition, seed=7, dtype="float64", **options
    )
    layer.build()
    return layer


PARTITIONS = ["mod", "div", "column", "replicated"]
# Every rule and combiner with several optimizers; only the first four ignore rows without ids in the batch.
CASES = [(name, PARTITIONS[i % 4], COMBINERS[(i + i // 4) % 4]) for i, name in enumerate(OPTIMIZERS)]
CASES += [("sgd", "column", "sqrtn"), ("adagrad", "mod", None), ("rmsprop", "column", "mean"), ("adam", "div", "sum")]


@pytest.mark.parametrize(("name", "partition", "combiner"), some_at((3,), CASES, every=4))
def test_each_optimizer_equals_one_process(name, partition, combiner, rank, size):
    layer = layer_of(partition, combiner)
    start, batches = layer.gather(), all_batches(size, uneven=False)
    traced = list(OPTIMIZERS).index(name) % 3 == 0
    train(layer, hk.DistributedOptimizer(OPTIMIZERS[name]()), combiner, batches, rank, traced)
    lazy = name in ("adam", "amsgrad") and partition != "replicated"
    expected = reference(start, OPTIMIZERS[name](), combiner, batches, lazy)
    np.testing.assert_allclose(layer.gather(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "lazy") for name in ("nesterov", "rmsprop", "ftrl")] + [("adam", "exact"), ("amsgrad", "exact")],
)
def test_lazy_and_exact_updates(name, how, rank, size):
    layer = layer_of("mod", "sum")
    start, batches = layer.gather(), all_batches(size, uneven=False)
    train(layer, hk.DistributedOptimizer(OPTIMIZERS[name](), sparse_updates=how), "sum", batches, rank)
    expected = reference(start, OPTIMIZERS[name](), "sum", batches, how == "lazy")
    np.testing.assert_allclose(layer.gather(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "combiner", "traced"),
    [("sgd", None, True), ("adagrad", "sum", False), ("sgd", "mean", False), ("adagrad", "sqrtn", True)],
)
def test_uneven_and_empty_batches_by_weight(name, combiner, traced, rank, size):
    layer = layer_of("mod", combiner)
    start, batches = layer.gather(), all_batches(size, uneven=True)
    optimizer = hk.DistributedOptimizer(OPTIMIZERS[name](), op=None)
    variables = layer.trainable_variables
    optimizer.build(variables)

    def step(ids, targets):
        with hk.DistributedGradientTape(tf.GradientTape(), weight=tf.shape(ids)[0]) as tape:
            loss = loss_of(layer(ids), targets, combiner)
        optimizer.apply(tape.gradient(loss, variables), variables)

    run = tf.function(step) if traced else step
    for ranks in batches:
        run(*(tf.constant(x) for x in ranks[rank]))
    expected = reference(start, OPTIMIZERS[name](), combiner, batches, lazy=False, weights=True)
    np.testing.assert_allclose(layer.gather(), expected, rtol=1e-9, atol=1e-11)


def test_the_global_norm_counts_every_rank_once(rank, size):
    layer = layer_of("mod", "mean")
    start, batches = layer.gather(), all_batches(size, uneven=False)
    train(layer, hk.DistributedOptimizer(OPTIMIZERS["sgd"](), clip_global_norm=0.05), "mean", batches, rank)
    expected = reference(start, OPTIMIZERS["sgd"](), "mean", batches, lazy=False, clip=0.05)
    np.testing.assert_allclose(layer.gather(), expected, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match=r"clipnorm: got 1\.0, expected None with sharded variables"):
        hk.DistributedOptimizer(keras.optimizers.SGD(0.1, clipnorm=1.0)).build(layer.trainable_variables)


@pytest.mark.parametrize("op", [hk.Average, hk.Sum])
def test_steps_are_accumulated(op, rank, size):
    layer = layer_of("div", "sum")
    start, batches = layer.gather(), all_batches(size, uneven=False)
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.1), op=op, accumulate_steps=2)
    train(layer, optimizer, "sum", batches, rank)
    table = tf.Variable(start)
    for first in range(0, STEPS, 2):
        with tf.GradientTape() as tape:
            both = [x for ranks in batches[first : first + 2] for x in ranks]
            losses = [loss_of(reference_lookup(table, i, "sum"), t, "sum") for i, t in both]
            total = tf.add_n(losses) if op == hk.Sum else tf.add_n(losses) / len(losses)
        table.assign_sub(float(np.float32(0.1)) * tf.convert_to_tensor(tape.gradient(total, table)))
    np.testing.assert_allclose(layer.gather(), table.numpy(), rtol=1e-10)


def test_sixteen_bits_on_the_way(rank, size):
    exact, rounded = layer_of("mod", "mean"), layer_of("mod", "mean", compression="bf16")
    batches = all_batches(size, uneven=False)
    for layer in (exact, rounded):
        train(layer, hk.DistributedOptimizer(OPTIMIZERS["adagrad"]()), "mean", batches, rank)
    difference = np.abs(exact.gather() - rounded.gather()).max()
    assert (difference == 0) if size == 1 else (0 < difference < 0.02)


def test_mixed_precision_in_a_model(rank, size):
    """Tables stay in float32, vectors are float16, and the loss scale survives the exchange."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, combiner="sum", seed=1)
        model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Dense(1, dtype="float32")])
        model.compile(hk.DistributedOptimizer(keras.optimizers.Adagrad(0.1)), "mse", jit_compile=False)
        assert layer.weights[0].dtype == "float32" and model.layers[0].compute_dtype == "float16"
        ids, _ = batch(0, rank, 8)
        before = layer.gather()
        hk.broadcast_variables(model.variables)
        assert (layer.gather() == before).all(), "shards are each rank's own"
        first = model.train_on_batch(ids, np.ones((8, 1)))
        for _ in range(5):
            last = model.train_on_batch(ids, np.ones((8, 1)))
        assert last < first and (layer.gather() != before).any()
        assert hk.compare_variables(model.layers[-1].variables)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(("dtype", "combiner"), [("bfloat16", "mean"), ("float16", "sqrtn"), ("bfloat16", "sum")])
def test_many_rows_of_sixteen_bits_are_summed_in_more(dtype, combiner, rank, size):
    table = hk.layers.Table("t", 2000, 1, combiner=combiner, initializer=1.0, dtype=dtype)
    layer = hk.layers.ShardedEmbeddingCollection([table], {"t": "row"}, dtype="float32")
    layer.build()
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(layer.trainable_variables)
    ids = np.concatenate([np.arange(1000), np.full(1000, 5)])[None]
    with tf.GradientTape() as tape:
        found = layer({"t": (ids, np.ones(ids.shape, "f4"))})["t"]
    expected = {"mean": 1.0, "sqrtn": 2000**0.5, "sum": 2000.0}[combiner]
    np.testing.assert_allclose(found, [[expected]], rtol=0.01)
    optimizer.apply(tape.gradient(found, layer.trainable_variables), layer.trainable_variables)
    moved = 1.0 - 1001 / {"mean": 2000, "sqrtn": 2000**0.5, "sum": 1}[combiner]
    np.testing.assert_allclose(layer.gather("t")[5].astype("f4"), [moved], rtol=0.02)


def test_numbers_are_clipped_after_rows_are_added_up(rank, size):
    layer = hk.layers.ShardedEmbedding(4, 1, embeddings_initializer=0.0)
    layer.build()
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0, clipvalue=0.5), op=hk.Sum)
    with tf.GradientTape() as tape:
        loss = 0.4 * tf.reduce_sum(layer(tf.constant([1])))
    optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
    np.testing.assert_allclose(layer.gather()[:, 0], [0.0, -min(0.5, 0.4 * size), 0.0, 0.0], rtol=1e-6)


@pytest.mark.parametrize("traced", [False, True])
def test_plain_sgd_updates_rank_after_rank(traced, monkeypatch, rank, size):
    """Equal rows are added up first, which takes longer, only if the gradient comes from several lookups."""
    updated = []
    split = RowsByRank.split
    monkeypatch.setattr(RowsByRank, "split", lambda *given: updated.append(len(split(*given))) or split(*given))
    variable, layer = hk.PartitionedVariable((8, 2)), hk.layers.ShardedEmbedding(8, 2, embeddings_initializer=0.0)
    layer.build()
    tables = [variable.local, *layer.trainable_variables]
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hk.Sum)
    optimizer.build(tables)

    def step(ids, lookups):
        with tf.GradientTape() as tape:
            found = [look(ids) for _ in range(lookups) for look in (variable.lookup, layer)]
            loss = tf.add_n([tf.reduce_sum(each) for each in found])
        optimizer.apply(tape.gradient(loss, tables), tables)

    step = tf.function(step) if traced else step
    ids = tf.constant([*range(8), rank])
    step(ids, 1)
    assert updated == ([size, size] if size > 1 else [])
    step(ids, 2)
    assert len(updated) == (0 if size == 1 else 4 if traced else 2)  # a graph has both, and selects one when it runs
    expected = np.zeros(8)
    for r in range(size):
        np.add.at(expected, [*range(8), r], -3.0)
    for whole in (variable.gather(), layer.gather()):
        np.testing.assert_array_equal(whole, np.stack([expected, expected], 1))


@pytest.mark.ranks(2, 3)
def test_an_update_may_come_late_or_twice(rank, size):
    """It reads the layer's last lookup, which may be another one than that of its gradient."""
    variable, layer = hk.PartitionedVariable((8, 2)), hk.layers.ShardedEmbedding(8, 2, embeddings_initializer=0.0)
    layer.build()
    tables = [variable.local, *layer.trainable_variables]
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hk.Sum)
    expected = np.zeros(8)
    gradients = []
    for ids in ([0, 1, rank], [4, 5, 4 + rank], [rank, 0, 1]):  # as many ids of each rank
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(look(tf.constant(ids))) for look in (variable.lookup, layer)])
        gradients.append(tape.gradient(loss, tables))
    for number in (0, 2, 2, 1):
        optimizer.apply(gradients[number], tables)
    for r in range(size):
        for ids, times in (([0, 1, r], 3), ([4, 5, 4 + r], 1)):
            np.add.at(expected, ids, -times)
    for whole in (variable.gather(), layer.gather()):
        np.testing.assert_array_equal(whole, np.stack([expected, expected], 1))


@pytest.mark.parametrize("traced", [False, True])
def test_variables_do_not_keep_the_layer_of_their_last_lookup(traced, rank, size):
    variable = hk.PartitionedVariable((8, 2))
    layer = hk.layers.ShardedEmbedding(8, 2)
    layer.build()
    tables = [variable.local, *layer.trainable_variables]
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0))

    def train(variable, layer):
        def step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable.lookup(ids)) + tf.reduce_sum(layer(ids))
            optimizer.apply(tape.gradient(loss, tables), tables)

        (tf.function(step) if traced else step)(tf.constant([0, rank]))

    train(variable, layer)
    gone = [weakref.ref(each) for each in (variable, layer, layer._collection._store)]
    del variable, layer
    gc.collect()
    assert [each() for each in gone] == [None] * 3
    gradients = [tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])) for _ in tables]
    optimizer.apply(gradients, tables)  # without a lookup
    assert optimizer.iterations == 2


def test_a_kept_lookup_is_valid_in_its_graph_and_does_not_keep_it(rank, size):
    """TensorFlow itself keeps graphs with custom gradients, so this one only requests rows."""
    source = KeyedVariable(tf.Variable(tf.zeros([4, 2])))
    kept = []
    graphs = []

    def request(keys):
        lookup = request_rows([source], [[keys]], find_fault([]))
        kept.append(KeptLookup(lookup))
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        inner = tf.function(lambda: kept[-1].rows(0) is None)
        rows = kept[-1].rows(0)
        return inner(), *((rows.ids, rows.counts) if rows is not None else ())

    keys = tf.constant([3, 0, rank], tf.int32)
    requested = [[key for key in dict.fromkeys((3, 0, r)) if key % size == rank] for r in range(size)]
    for traced in (False, True):
        function = tf.function(request, autograph=False) if traced else request
        is_elsewhere, *rows = function(keys)
        assert is_elsewhere and (size > 1) == bool(rows)
        assert (kept[-1].rows(0) is None) == (traced or size == 1)
        if rows:
            assert rows[0].numpy().tolist() == [key // size for of_rank in requested for key in of_rank]
            assert rows[1].numpy().tolist() == [len(of_rank) for of_rank in requested]
        del function
    gc.collect()
    assert [graph() for graph in graphs[1:]] == [None] and kept[1].rows(0) is None
