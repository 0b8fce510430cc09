"""Programs that call ``tf.config.experimental.enable_op_determinism`` run, and give the same bits twice."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.config import disable_op_determinism

import hvdkit as hk
from hvdkit.watchdog.flight_recorder import FlightReader, recorder

layers = keras.layers


@pytest.fixture(autouse=True)
def deterministic():
    tf.config.experimental.enable_op_determinism()
    yield
    disable_op_determinism()


def bits(model):
    return b"".join(np.asarray(w).tobytes() for w in model.weights)


def fit_with_everything(rng):
    """Train with what adds ops to a step: a sharded table, synchronized statistics, sharded optimizer state."""
    keras.utils.set_random_seed(1)
    x, ids = rng.normal(size=(24, 3)).astype("float32"), rng.integers(0, 9, (24, 2))
    numbers, keys = keras.Input((3,)), keras.Input((2,), dtype="int64")
    rows = layers.Flatten()(hk.layers.ShardedEmbedding(9, 4)(keys))
    hidden = layers.Dropout(0.2)(layers.BatchNormalization(synchronized=True)(layers.Dense(5)(numbers)))
    model = keras.Model([numbers, keys], layers.Dense(1)(layers.Concatenate()([hidden, rows])))
    model.compile(hk.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_states=True), "mse")
    hk.fit(model, [x, ids], x.sum(1), batch_size=8, epochs=2, verbose=0)
    hk.evaluate(model, [x, ids], x.sum(1), batch_size=8, verbose=0)
    hk.predict(model, [x, ids], batch_size=8, verbose=0)
    return model


def loop(rng):
    keras.utils.set_random_seed(1)
    x = rng.normal(size=(24, 3)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu"), layers.Dropout(0.1), layers.Dense(1)])
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.1))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return hk.allreduce(loss), hk.allgather(y), hk.broadcast(tf.constant(3.0))  # the last one is a constant

    for batch in hk.data.GlobalBatches((x, x.sum(1)), 8, shuffle_seed=3, epochs=2):
        step(*batch)
    return model


@pytest.mark.parametrize("train", [fit_with_everything, loop])
def test_runs_are_bit_equal(train):
    first, second = (bits(train(np.random.default_rng(0))) for _ in range(2))
    assert first == second


def test_the_flight_recorder_knows_the_collectives_of_graphs():
    """TensorFlow's clock cannot be used."""
    before = FlightReader(recorder().file).state().number

    @tf.function
    def step(x):
        return hk.allreduce(x, hk.Sum)

    for _ in range(3):
        np.testing.assert_array_equal(step(tf.ones(2)), np.full(2, hk.size()))
    records = [r for r in FlightReader(recorder().file).records(before) if not r.is_eager]
    assert len(records) == (3 if hk.size() > 1 else 0)
    assert all(r.end is not None and "test_determinism.py" in r.line for r in records), records
