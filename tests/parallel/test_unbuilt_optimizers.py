"""Sharded variables under every Keras optimizer, in programs that build neither the optimizer nor the layer.

The optimizer creates its slots while Keras traces the first step. The reference is plain Keras on the whole table,
in each process, with an optimizer that Keras builds in eager mode.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import SEED, line, mine, plain, same_weights
from helpers.tiers import at_night

import hvdkit as hk

ROWS, WIDTH, EPOCHS = 30, 4, 3
USED = 25  # rows that occur in each batch; the others have no gradient
TABLE = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype("float32")
IDS = (np.arange(36) % USED).reshape(12, 3).astype("int32")
TARGETS = np.random.default_rng(2).normal(size=(12, WIDTH)).astype("float32")

kinds = keras.optimizers
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adadelta": (kinds.Adadelta, {"learning_rate": 1.0}),
    "adagrad": (kinds.Adagrad, {"learning_rate": 0.1}),
    "adam": (kinds.Adam, {"learning_rate": 0.1, "amsgrad": True}),
    "adamax": (kinds.Adamax, {"learning_rate": 0.1}),
    "adamw": (kinds.AdamW, {"learning_rate": 0.1}),
    "ftrl": (kinds.Ftrl, {"learning_rate": 0.1, "initial_accumulator_value": 0.3}),
    "lion": (kinds.Lion, {"learning_rate": 0.01}),
    "momentum": (kinds.SGD, {"learning_rate": 0.1, "momentum": 0.9, "use_ema": True}),
    "nadam": (kinds.Nadam, {"learning_rate": 0.1}),
    "rmsprop": (kinds.RMSprop, {"learning_rate": 0.1, "centered": True}),
    "sgd": (kinds.SGD, {"learning_rate": 0.1}),
}
# First values of the slots that do not start at zero.
FIRST_VALUES = {"adagrad": 0.1, "ftrl": 0.3}


def optimizer_of(name: str) -> Any:
    cls, options = OPTIMIZERS[name]
    return cls(**options)


def model_of(embedding: Any) -> Any:
    return keras.Sequential([keras.Input((3,), dtype="int32"), embedding, keras.layers.GlobalAveragePooling1D()])


def plain_weights(name: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the table and the optimizer's slots after plain Keras has trained the whole table on all rows."""
    embedding = keras.layers.Embedding(ROWS, WIDTH, weights=[TABLE])
    model = model_of(embedding)
    optimizer = optimizer_of(name)
    optimizer.build(model.trainable_variables)
    for _ in range(EPOCHS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(IDS) - TARGETS))
        gradient = tf.convert_to_tensor(tape.gradient(loss, embedding.embeddings.value))
        optimizer.apply([gradient], model.trainable_variables)
    optimizer.finalize_variable_values(model.trainable_variables)
    return embedding.embeddings.numpy(), [v.numpy() for v in optimizer.variables if tuple(v.shape) == TABLE.shape]


class TableLayer:
    """A model with one sharded table."""

    def __init__(self, **options: Any):
        self.embedding = hk.layers.ShardedEmbedding(ROWS, WIDTH, embeddings_initializer=TABLE, **options)
        self.model = model_of(self.embedding)

    def whole(self) -> np.ndarray:
        return self.embedding.gather()


def with_hk_fit(layer: TableLayer, optimizer: Any, path: Any) -> None:
    layer.model.compile(optimizer, "mse")
    hk.fit(layer.model, IDS, TARGETS, batch_size=12, epochs=EPOCHS, shuffle=False, verbose=0)


def with_plain_fit(layer: TableLayer, optimizer: Any, path: Any) -> None:
    rank, size = hk.rank(), hk.size()
    layer.model.compile(hk.DistributedOptimizer(optimizer), "mse", jit_compile=False)
    options = {"batch_size": 12 // size, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    layer.model.fit(
        mine(IDS, rank, size), mine(TARGETS, rank, size), callbacks=[hk.callbacks.BroadcastInitial()], **options
    )


def with_resumed_hk_fit(layer: TableLayer, optimizer: Any, path: Any) -> None:
    """Train all epochs but one in another model, whose checkpoint this one continues from."""
    first = TableLayer()
    first.model.compile(type(optimizer).from_config(optimizer.get_config()), "mse")
    fit = {"batch_size": 12, "shuffle": False, "verbose": 0, "logdir": path}
    hk.fit(first.model, IDS, TARGETS, epochs=EPOCHS - 1, **fit)
    layer.model.compile(optimizer, "mse")
    hk.fit(layer.model, IDS, TARGETS, epochs=EPOCHS, **fit)


def with_loop(layer: TableLayer, optimizer: Any, *, traced: bool) -> None:
    rank, size = hk.rank(), hk.size()
    distributed = hk.DistributedOptimizer(optimizer)
    model = layer.model

    def step(ids: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(ids) - targets))
        gradients = tape.gradient(loss, model.trainable_variables)
        distributed.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(step) if traced else step
    for _ in range(EPOCHS):
        run(mine(IDS, rank, size), mine(TARGETS, rank, size))
    distributed.finalize_variable_values(model.trainable_variables)


def with_traced_loop(layer: TableLayer, optimizer: Any, path: Any) -> None:
    with_loop(layer, optimizer, traced=True)


def with_eager_loop(layer: TableLayer, optimizer: Any, path: Any) -> None:
    with_loop(layer, optimizer, traced=False)


WAYS = (with_hk_fit, with_plain_fit, with_resumed_hk_fit, with_traced_loop, with_eager_loop)


def check(layer: TableLayer, train: Any, name: str, path: Any, case: str) -> None:
    train(layer, optimizer_of(name), path)
    expected, _ = plain_weights(name)
    np.testing.assert_allclose(layer.whole(), expected, rtol=2e-5, atol=2e-6, err_msg=f"{name}, {case}")


@pytest.mark.parametrize("train", at_night(WAYS, but=[with_hk_fit, with_resumed_hk_fit, with_eager_loop]))
def test_every_optimizer_equals_plain_keras(train, shared_path):
    for name in FIRST_VALUES if train is with_resumed_hk_fit else OPTIMIZERS:
        check(TableLayer(), train, name, shared_path / name, train.__name__)


@pytest.mark.parametrize("train", [with_hk_fit, with_traced_loop])
@pytest.mark.parametrize("place", [{"host": True}, {"partition": "column"}, {"partition": "div"}], ids=str)
def test_slots_that_do_not_start_at_zero(train, place, shared_path):
    for name in FIRST_VALUES:
        check(TableLayer(**place), train, name, shared_path, f"{place}")


@pytest.mark.parametrize("train", [with_hk_fit, with_traced_loop, with_eager_loop])
def test_the_optimizer_of_a_single_table(train, shared_path):
    for name in FIRST_VALUES:
        layer = TableLayer(optimizer=optimizer_of(name))
        train(layer, keras.optimizers.SGD(1.0), shared_path)
        np.testing.assert_allclose(layer.whole(), plain_weights(name)[0], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("traced", at_night([True, False], but=[False]))
def test_a_partitioned_variable(traced, rank, size):
    for name in OPTIMIZERS:
        table = hk.PartitionedVariable((ROWS, WIDTH), initializer=TABLE)
        optimizer = hk.DistributedOptimizer(optimizer_of(name), sparse_updates="exact")

        def step(ids, targets, table=table, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.reduce_mean(table.lookup(ids), axis=1) - targets))
            optimizer.apply([tape.gradient(loss, table.local)], [table.local])

        run = tf.function(step) if traced else step
        for _ in range(EPOCHS):
            run(mine(IDS, rank, size), mine(TARGETS, rank, size))
        optimizer.finalize_variable_values([table.local])
        np.testing.assert_allclose(table.gather(), plain_weights(name)[0], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.core
@pytest.mark.parametrize("name", FIRST_VALUES)
def test_slots_of_rows_without_a_gradient_keep_their_first_value(name, size):
    """The sums of squares of the first rows follow the formula a = a0 + g^2; the others stay at a0."""
    layer = TableLayer()
    with_hk_fit(layer, optimizer_of(name), None)
    slots = [v for v in layer.model.optimizer.variables if "accumulator" in v.path]
    assert len(slots) == 1
    rows = np.arange(hk.rank(), ROWS, size)  # of partition="mod"
    accumulated = next(slot for slot in plain_weights(name)[1] if slot[-1, 0] == np.float32(FIRST_VALUES[name]))
    np.testing.assert_allclose(slots[0].numpy(), accumulated[rows], rtol=2e-5)
    assert (slots[0].numpy()[rows >= USED] == np.float32(FIRST_VALUES[name])).all()


def test_slots_of_new_ids_start_at_their_first_value():
    """A table with eviction: rows change their ids twice, and Adagrad's sums begin again with each new id."""
    rate, first, steps = 0.1, 0.1, 3
    embedding = hk.layers.ShardedEmbedding(64, 1, evict="lru", embeddings_initializer="ones", combiner="sum")
    model = keras.Sequential([keras.Input((1,), dtype="int64"), embedding])
    model.compile(keras.optimizers.Adagrad(rate), "mse")
    for generation in range(3):
        ids = 1000 * generation + np.arange(48).reshape(48, 1)
        hk.fit(model, ids, np.zeros((48, 1), "float32"), batch_size=48, epochs=steps, shuffle=False, verbose=0)
        weight, total = 1.0, first
        for _ in range(steps):
            gradient = 2 * weight / 48
            total += gradient**2
            weight -= rate * gradient / np.sqrt(total + 1e-7)
        held, rows = embedding.ids(), embedding.gather()
        new = np.isin(held, ids)
        assert new.sum() >= 32, "most of the new ids have a row"
        np.testing.assert_allclose(rows[new], weight, rtol=1e-5)


def test_slots_that_are_sharded_over_ranks(rng):
    """``shard_states=True``: each rank creates its part of the slots of replicated variables."""
    x, y = line(rng)
    for name in FIRST_VALUES:

        def build(name=name):
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
            model.compile(optimizer_of(name), "mse")
            return model

        one, _ = plain(build, x, y, batch_size=11, epochs=2, shuffle=False)
        keras.utils.set_random_seed(SEED)
        many = build()
        many.compile(hk.DistributedOptimizer(optimizer_of(name), shard_states=True), "mse")
        hk.fit(many, x, y, batch_size=11, epochs=2, shuffle=False, verbose=0)
        same_weights(many, one)
