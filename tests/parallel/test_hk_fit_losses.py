"""hk.fit minimizes the same loss as one process, whatever its divisor: sums, masks, weights, several losses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import compare, line

import hvdkit as hk
from hvdkit.collectives.batch_share import share_of_batch

layers, losses = keras.layers, keras.losses


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_other_reductions_with_weights(rng, reduction):
    x = rng.normal(size=(21, 3)).astype("float32")
    y, weights = x[:, :1] * 2, rng.uniform(size=21).astype("float32")

    def build():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile(
            keras.optimizers.SGD(0.01), losses.MeanSquaredError(reduction=reduction), weighted_metrics=["mae"]
        )
        return model

    compare(build, x, y, batch_size=8, epochs=2, sample_weight=weights)


def test_a_loss_of_one_number_for_each_row_is_refused():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", losses.MeanSquaredError(reduction=None))
    with pytest.raises(hk.HvdkitError, match=r"loss: got .* reduction=None"):
        hk.fit(model, np.ones((8, 3)), np.ones((8, 1)), verbose=0)


class ReducesItself(keras.Model):
    """A ``train_step`` and a layer with loss objects for each row, whose values they reduce."""

    def __init__(self):
        super().__init__()
        self.error = losses.MeanSquaredError(reduction="none")
        self.dense = layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y, weights = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.error(y, self(x)) * weights)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        x, y, weights = data
        self.loss_tracker.update_state(tf.reduce_mean(self.error(y, self(x)) * weights))
        return {"loss": self.loss_tracker.result()}


@pytest.mark.nightly
@pytest.mark.ranks(1, 2)
def test_a_step_may_reduce_the_losses_of_rows_itself(rng):
    x = rng.normal(size=(22, 3)).astype("float32")
    data = (x, x[:, :1] * 2, rng.uniform(size=22).astype("float32"))

    def build():
        model = ReducesItself()
        model.compile(keras.optimizers.SGD(0.05))
        return model

    compare(build, tf.data.Dataset.from_tensor_slices(data).batch(7), epochs=2)
    compare(build, *data[:2], sample_weight=data[2], batch_size=7, epochs=2, shuffle=False, validation_data=data)


class Coupled(keras.Model):
    """A model in which each row's loss depends on all rows of the global batch, which the port gathers."""

    def __init__(self, gathers):
        super().__init__()
        self.hidden = layers.Dense(3)
        self.gathers = gathers

    def call(self, x):
        return self.hidden(x)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            queries = self(x)
            total = tf.reduce_sum(queries**2, axis=0)
            keys, total = (hk.allgather(queries), hk.allreduce(total, hk.Sum)) if self.gathers else (queries, total)
            logits = tf.matmul(queries, keys, transpose_b=True)
            loss = tf.reduce_mean(tf.reduce_logsumexp(logits, axis=1)) + 0.01 * tf.reduce_sum(total**2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"rows": tf.reduce_mean(x)}


@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
def test_collectives_in_a_loss_weigh_uneven_shares(rng):
    x = rng.normal(size=(23, 4)).astype("float32")
    models = []

    def build():
        models.append(Coupled(gathers=bool(models)))
        models[-1].compile(keras.optimizers.SGD(0.01))
        return models[-1]

    def make_data():
        return tf.data.Dataset.from_tensor_slices(x).batch(7, drop_remainder=True)

    compare(build, make_data, epochs=2)


def test_a_graph_of_a_step_weights_nothing_outside_of_it(rank, size):
    weight = tf.Variable([2.0])

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hk.allreduce(x * weight, hk.Sum))
        return tape.gradient(loss, weight)

    def both(factor):
        with share_of_batch(tf.constant(factor, tf.float64)):
            return float(gradient(tf.constant([3.0]))[0])

    assert [both(0.5), both(1.5)] == [3.0 * size] * 2  # a factor that all ranks have cancels
    assert float(gradient(tf.constant([3.0]))[0]) == 3.0 * size
    factor = 2 * (rank + 1) / (size + 1)
    with share_of_batch(tf.constant(factor, tf.float64)):
        with share_of_batch(None):
            assert float(gradient(tf.constant([3.0]))[0]) == 3.0 * size
        found = float(gradient(tf.constant([3.0]))[0])
    assert found == pytest.approx(3.0 * size / factor)
    assert float(gradient(tf.constant([3.0]))[0]) == 3.0 * size


def test_second_gradients_of_collectives_are_refused_on_uneven_shares(rng):
    """It is unknown which loss such a gradient belongs to, and so its weight is unknown."""
    x = tf.constant(rng.normal(size=3))
    with share_of_batch(tf.constant(0.5, tf.float64)), tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            total = tf.reduce_sum(hk.allreduce(x, hk.Sum) ** 3)
        with pytest.raises(hk.HvdkitError, match="second-order gradient of allreduce"):
            inner.gradient(total, x)


@pytest.mark.parametrize("scales", [True, False])
def test_compile_decides_whether_losses_are_scaled(rng, scales):
    """Under mixed_float16 ``auto_scale_loss=False`` trains without a LossScaleOptimizer, as in one process."""
    x, y = line(rng)
    y = y / 100  # no gradient overflows, however the ranks divide the batch

    def build():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.1), "mse", auto_scale_loss=scales)
        return model

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        one, many = compare(build, x, y, batch_size=11, epochs=2, rtol=2e-3, atol=2e-3)
    finally:
        keras.config.set_dtype_policy(before)
    assert isinstance(one.optimizer, keras.optimizers.LossScaleOptimizer) == scales
    assert isinstance(many.optimizer, keras.optimizers.LossScaleOptimizer) == scales
