"""Tables with changing ids: which ids get rows, the initial values, and the optimizer's slots."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values

import hvdkit as hk
from hvdkit.cluster.logs import warn_once
from hvdkit.sharding.hashing import bucket_of, first_rows
from hvdkit.sharding.table import BUCKET
from hvdkit.sharding.vocabulary import NO_ID

ROWS, WIDTH, STEPS = 3 * BUCKET, 4, 8
WORDS = keras.initializers.RandomUniform(-1.0, 1.0)


class Reference:
    """One process with a dictionary: the bucket rule, and plain optimizers on the rows that a step requests."""

    def __init__(self, evict, optimizer):
        self.evict, self.optimizer = evict, optimizer
        self.rows: dict[int, dict] = {}
        self.step = 0
        self.first = first_rows(WORDS, (ROWS, WIDTH), "float64", 7, "embeddings")

    def look_up(self, ids):
        self.step += 1
        distinct = sorted(set(ids.ravel().tolist()))
        for i in distinct:
            if i in self.rows:
                self.rows[i]["steps"] += 1
                self.rows[i]["last"] = self.step
        for i in distinct:
            if i not in self.rows:
                self.take_in(i)
        return np.array([self.rows[i]["w"] if i in self.rows else np.zeros(WIDTH) for i in ids.ravel()])

    def take_in(self, new):
        bucket = int(bucket_of(tf.constant([new], tf.int64), ROWS // BUCKET)[0])
        inside = {i: r for i, r in self.rows.items() if r["bucket"] == bucket}
        if len(inside) == BUCKET:
            age = {i: (r["steps"] if self.evict == "lfu" else 0, r["last"]) for i, r in inside.items()}
            idle = [i for i, r in sorted(inside.items(), key=lambda item: item[1]["way"]) if r["last"] < self.step]
            if not idle:
                return
            oldest = min(idle, key=lambda i: age[i])
            way = self.rows.pop(oldest)["way"]
        else:
            way = min(set(range(BUCKET)) - {r["way"] for r in inside.values()})
        w = self.first(tf.constant([new], tf.int64)).numpy()[0]
        self.rows[new] = {"bucket": bucket, "way": way, "steps": 1, "last": self.step, "w": w, "a": 0.1, "m": 0.0}

    def update(self, gradients):
        for i, g in gradients.items():
            if i in self.rows:
                row = self.rows[i]
                if self.optimizer == "adagrad":
                    row["a"] = row["a"] + g * g
                    row["w"] = row["w"] - 0.5 * g / np.sqrt(row["a"] + 1e-7)
                else:
                    row["m"] = 0.5 * row["m"] - np.float64(np.float32(0.1)) * g
                    row["w"] = row["w"] + row["m"]


OPTIMIZERS = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.5),
}


def ids_of(step, rank, many=60):
    """Return ids of which some recur and some occur once; a rank may have none."""
    rng = np.random.default_rng([step, rank])
    n = 0 if rank == 1 and step % 3 == 0 else many
    known = rng.zipf(1.2, n) % 90
    return np.where(rng.random(n) < 0.5, known, rng.integers(-(2**62), 2**62, n)).astype("i8")


def layer_of(evict, **options):
    layer = hk.layers.ShardedEmbedding(
        ROWS - 5, WIDTH, evict=evict, embeddings_initializer=WORDS, seed=7, dtype="float64", name="t", **options
    )
    layer.build()
    return layer


@pytest.mark.parametrize(
    ("evict", "name", "how", "traced"),
    [("lru", "adagrad", "auto", True), ("lfu", "momentum", "lazy", False), ("lfu", "adagrad", "auto", True)],
)
def test_rows_and_slots_equal_one_process(evict, name, how, traced, rank, size):
    layer = layer_of(evict)
    optimizer = hk.DistributedOptimizer(OPTIMIZERS[name](), op=hk.Sum, sparse_updates=how)
    reference = Reference(evict, name)

    def step(ids, weights):
        with tf.GradientTape() as tape:
            found = layer(ids, training=True)
            loss = tf.reduce_sum(found * weights[:, None])
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return found

    given = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.float64)]
    run = tf.function(step, input_signature=given) if traced else step
    optimizer.build(layer.trainable_variables)
    evicted = 0
    for number in range(STEPS):
        parts = [ids_of(number, r) for r in range(size)]
        weights = [np.random.default_rng([9, number, r]).normal(size=len(p)) for r, p in enumerate(parts)]
        known = set(reference.rows)
        expected = reference.look_up(np.concatenate(parts))
        found = run(tf.constant(parts[rank]), tf.constant(weights[rank]))
        start = sum(len(p) for p in parts[:rank])
        np.testing.assert_allclose(found, expected[start : start + len(parts[rank])], rtol=1e-6, atol=1e-8)
        gradients: dict = {}
        for i, w in zip(np.concatenate(parts).tolist(), np.concatenate(weights), strict=True):
            gradients[i] = gradients.get(i, 0.0) + np.full(WIDTH, w)
        reference.update(gradients)
        evicted += len(known - set(reference.rows))
    assert evicted > 0
    ids, rows = layer.ids(), layer.gather()
    assert ids.shape == (ROWS,) and rows.shape == (ROWS, WIDTH)
    assert set(ids[ids != NO_ID].tolist()) == set(reference.rows)
    for i, row in zip(ids.tolist(), rows, strict=True):
        np.testing.assert_allclose(row, reference.rows[i]["w"] if i != NO_ID else 0.0, rtol=1e-6, atol=1e-8)
    before = layer.ids()
    unknown = layer(tf.constant([2**62 + rank, NO_ID]), training=False)
    np.testing.assert_array_equal(unknown, np.zeros((2, WIDTH)))
    np.testing.assert_array_equal(layer.ids(), before)


@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
def test_a_full_bucket_leaves_new_ids_without_a_row(rank, size):
    layer = hk.layers.ShardedEmbedding(1, 2, evict="lru", seed=1)  # a single bucket, which one rank holds
    ids = tf.range(rank * 40, rank * 40 + 40, dtype=tf.int64)
    rows = layer(ids, training=True).numpy()
    smallest = rank * 40 + np.arange(40) < BUCKET  # the first to arrive, in the order of their numbers
    np.testing.assert_array_equal((rows != 0).any(1), smallest)
    again = layer(ids[:5]).numpy()
    np.testing.assert_array_equal(again, rows[:5])
    assert sorted(layer.ids().tolist()) == list(range(BUCKET))


@pytest.mark.parametrize("how", ["exact", "accumulated", "average"])
def test_no_slot_remembers_the_id_before(how, rank, size):
    """With an optimizer that updates whole shards, with accumulation, and with Keras's moving average of weights."""
    layer = hk.layers.ShardedEmbedding(1, 2, evict="lru", embeddings_initializer=0.25, seed=1)
    layer.build()
    made = keras.optimizers.SGD(0.5, momentum=0.9, use_ema=how == "average", ema_momentum=0.5)
    optimizer = hk.DistributedOptimizer(made, op=hk.Sum, accumulate_steps=2 if how == "accumulated" else 1)
    optimizer.build(layer.trainable_variables)

    def step(first, share=1.0):
        with tf.GradientTape() as tape:
            loss = share * tf.reduce_sum(layer(tf.range(first, first + BUCKET, dtype=tf.int64), training=True))
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)

    step(0)  # the first of two accumulated steps
    step(1000, share=0.0)  # all rows change owners, with zero gradients
    np.testing.assert_array_equal(layer.gather(), np.full((BUCKET, 2), 0.25))
    for variable in optimizer.variables:
        if variable.path.endswith("momentum") and variable.shape[0] > 1:
            np.testing.assert_array_equal(variable, np.zeros(variable.shape))
        if "average" in variable.path and variable.shape[0] > 1:
            np.testing.assert_array_equal(variable[:BUCKET], np.full((BUCKET, 2), 0.25))


def table_of_one_bucket(first=1.0, **options):
    layer = hk.layers.ShardedEmbedding(1, 1, evict="lru", embeddings_initializer=first, seed=1, **options)
    layer.build()
    return layer


def row_of(layer, identity):
    return layer.gather()[layer.ids().tolist().index(identity), 0]


def test_rows_of_a_step_stay_until_its_update(rank, size):
    """As in a two-tower model, which calls one layer twice."""
    layer = table_of_one_bucket()
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hk.Sum)
    with tf.GradientTape() as tape:
        first = layer(np.arange(100, 120), training=True)
        second = layer(np.arange(200, 220), training=True).numpy()
        loss = tf.reduce_sum(first) / size
    optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
    np.testing.assert_array_equal((second != 0)[:, 0], np.arange(20) < BUCKET - 20)
    assert row_of(layer, 119) == 0.0 and row_of(layer, 211) == 1.0
    assert (layer(np.arange(300, 320), training=True).numpy() == 1.0).all(), "after the update rows are free again"


def test_every_optimizer_forgets_the_id_before(rank, size):
    layer = table_of_one_bucket()
    optimizers = [hk.DistributedOptimizer(keras.optimizers.Adagrad(0.1), op=hk.Sum) for _ in range(2)]
    optimizers.append(hk.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.9), op=None))  # tape's weights

    def step(optimizer, first, share=1.0):
        tape = tf.GradientTape()
        if optimizer is optimizers[2]:
            tape = hk.DistributedGradientTape(tape, weight=1.0)
        with tape:
            loss = share * tf.reduce_sum(layer(np.arange(first, first + BUCKET), training=True)) / size
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)

    for optimizer in optimizers:
        step(optimizer, 0)
    step(optimizers[0], 100)
    step(optimizers[1], 100)
    for optimizer in optimizers[:2]:
        (slot,) = [v for v in optimizer.variables if "accumulator" in v.path]
        np.testing.assert_allclose(slot[: BUCKET if slot.shape[0] > 1 else 0], 0.1 + 1.0)
    step(optimizers[2], 200, share=0.0)
    np.testing.assert_array_equal(layer.gather(), np.ones((BUCKET, 1)))


def test_sums_over_steps_forget_an_id_that_left_between_them(rank, size):
    layer = table_of_one_bucket()
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hk.Sum, accumulate_steps=2)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True)) / size
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)

    step(np.arange(BUCKET))
    layer(np.arange(100, 100 + BUCKET), training=True)  # a step that fails after its lookup
    step(np.arange(100, 101))
    assert row_of(layer, 100) == 0.0 and row_of(layer, 101) == 1.0


def test_counts_of_steps_and_the_clock_have_an_end_and_an_order(rank, size):
    layer = hk.layers.ShardedEmbeddingCollection(
        [hk.layers.Table("any", 1, 1, evict="lfu"), hk.layers.Table("rows", 3, 1)], {"rows": "row"}
    )
    given = {"any": tf.constant([7]), "rows": tf.constant([0])}
    layer(given, training=True)
    weights = {v.name: v for v in layer.weights}
    used = weights["any_used"]
    used.assign(tf.where(used.value > 0, 2**62 + 1, used.value))  # as after millions of steps
    layer(given, training=True)
    assert weights["any_clock"].numpy()[0] == 2 and (used.numpy().max(initial=0) > 0 or not used.shape[0])
    bad = {**given, "rows": tf.constant([3 if rank == 0 else 0])}
    for call in (layer, tf.function(layer)):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            call(bad, training=True)
    assert weights["any_clock"].numpy()[0] == 2


@pytest.mark.ranks(2, 3)
def test_who_has_which_row_is_saved(shared_path, rank, size):
    def trained(steps, seed):
        layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, evict="lfu", seed=seed, name="words")
        layer.build()
        optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(0.1))
        optimizer.build(layer.trainable_variables)
        state = {"layer": layer, "optimizer": optimizer}
        for number in steps:
            train(state, number)
        return state

    def train(state, number):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(state["layer"](ids_of(number, rank), training=True) - 1.0))
        variables = state["layer"].trainable_variables
        state["optimizer"].apply(tape.gradient(loss, variables), variables)

    state, again = trained(range(6), 3), trained([], 3)
    hk.checkpoint.restore(hk.checkpoint.save(shared_path / "step-6", state), again)
    for number in (6, 7):
        train(state, number), train(again, number)
    np.testing.assert_array_equal(again["layer"].ids(), state["layer"].ids())
    np.testing.assert_array_equal(again["layer"].gather(), state["layer"].gather())
    same_values(again["optimizer"].variables, state["optimizer"].variables)


def test_a_frozen_table_keeps_its_ids_and_rows():
    """Transfer learning: a table of pretrained rows is frozen, and the rest of the model is trained on new ids."""
    x, y = np.arange(64)[:, None], np.ones((64, 1), "float32")
    for evict in ("lru", "lfu"):
        table = hk.layers.ShardedEmbedding(64, WIDTH, evict=evict)
        inputs = keras.Input((1,), dtype="int64")
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(table(inputs))))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        hk.fit(model, x, y, batch_size=16, verbose=0)
        ids, rows = table.ids(), table.gather()
        assert (ids != NO_ID).sum() > 32
        table.trainable = False
        model.compile(keras.optimizers.SGD(0.1), "mse")
        hk.fit(model, x + 1000, y, batch_size=16, verbose=0)
        np.testing.assert_array_equal(table.ids(), ids)
        np.testing.assert_array_equal(table.gather(), rows)


def test_a_table_with_as_many_rows_as_ids_is_reported_once(capfd):
    """Ids may occupy one of 32 rows: some of 1,024 ids have none in 1,024 rows, and nearly all have one in 2,048."""
    warn_once.cache_clear()
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, (1024, 1))
    for rows, distributed, expected in ((1024, False, 1), (1024, True, 1), (2048, False, 0)):
        table = hk.layers.ShardedEmbedding(rows, 2, evict="lru", name=f"words-{rows}-{distributed}")
        model = keras.Sequential(
            [keras.Input((1,), dtype="int64"), table, keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(hk.DistributedOptimizer(optimizer) if distributed else optimizer, "mse", jit_compile=False)
        x, y = ids, np.ones((1024, 1), "float32")
        capfd.readouterr()
        if distributed:
            options = {"epochs": 2, "batch_size": 256, "verbose": 0, "callbacks": [hk.callbacks.BroadcastInitial()]}
            model.fit(x[hk.rank() :: hk.size()], y[hk.rank() :: hk.size()], **options)
        else:
            hk.fit(model, x, y, epochs=2, batch_size=256, verbose=0)
        reports = capfd.readouterr().err.count("ids evict each other although rows are free")
        assert reports == (expected if hk.is_chief() else 0), rows
        assert expected == ((table.ids() != NO_ID).sum() < 980)
