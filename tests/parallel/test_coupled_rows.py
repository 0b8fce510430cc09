"""Models whose output for a row depends on the other rows of its batch are an error; models that look alike are not."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import compare, line, plain, ported, raises_on_several, same_logs, same_weights

import hvdkit as hk

layers = keras.layers
ops = keras.ops
MATCH = r"model: got .(functional|sequential).*whose output for a row depends on.*hk\.gather_rows.*loss_scope"


class Centered(layers.Layer):
    """Subtracts the batch's mean."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class AcrossRows(layers.Layer):
    """A softmax on the wrong axis."""

    def call(self, x):
        return ops.softmax(x, axis=0)


class Running(layers.Layer):
    """Each row gets the sum of those before it."""

    def call(self, x):
        return ops.cumsum(x, axis=0)


class BatchDeviation(layers.Layer):
    """The layer of progressive GANs that appends the deviation of the batch."""

    def call(self, x):
        deviation = ops.mean(ops.std(x, axis=0, keepdims=True)) * ops.ones_like(x[:, :1])
        return ops.concatenate([x, deviation], axis=1)


class OwnBatchNorm(layers.Layer):
    """Normalizes by the batch in training, and by averages otherwise."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False)

    def call(self, x, training=None):
        if not training:
            return x - self.mean
        mean = ops.mean(x, axis=0)
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return x - mean


class OwnDropout(layers.Layer):
    def call(self, x, training=None):
        return tf.nn.dropout(x, 0.5) if training else x


class OwnBlock(layers.Layer):
    """A layer that passes ``training`` on, and one that changes its own kernel in training."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(4)
        self.normalization = layers.SpectralNormalization(layers.Dense(4))
        self.dropout = layers.Dropout(0.5)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4))

    def call(self, x, training=None):
        if training:
            self.kernel.assign(self.kernel / ops.norm(self.kernel))
        x = self.dropout(self.inner(x), training=training)
        return self.normalization(x, training=training) @ self.kernel


class OfAllRanks(layers.Layer):
    """Subtracts the mean of the global batch."""

    def call(self, x):
        return x - ops.mean(hk.gather_rows(x), axis=0, keepdims=True)


class Sampling(layers.Layer):
    def call(self, x):
        return x + keras.random.normal(ops.shape(x))


def with_layer(*inner, units=1):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), *inner, layers.Dense(units)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def functional():
    first, second = keras.Input((3,)), keras.Input((3,))
    product = layers.Lambda(lambda pair: ops.tensordot(*pair, 2) * ops.ones_like(pair[0][:, :1]))([first, second])
    model = keras.Model([first, second], product + layers.Dense(1)(first))
    model.compile("sgd", "mse")
    return model


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("layer", [Centered, AcrossRows, Running, BatchDeviation, OwnBatchNorm])
def test_layers_that_compare_rows_are_an_error_before_the_second_step(rng, layer):
    """Arrays before the first step, datasets after it."""
    x, y = line(rng, 24)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    for data in ({"x": x, "y": y, "batch_size": 8}, {"x": dataset}):
        model = with_layer(layer())
        with raises_on_several(hk.HvdkitError, MATCH):
            hk.fit(model, **data, epochs=2, verbose=0)
        if hk.size() > 1:
            assert int(model.optimizer.iterations) == (data["x"] is dataset)


@pytest.mark.core(2)
def test_functional_models_evaluation_and_prediction(rng):
    x, y = line(rng, 24)
    with raises_on_several(hk.HvdkitError, MATCH):
        hk.fit(functional(), (x, x[::-1].copy()), y, batch_size=8, verbose=0)
    with raises_on_several(hk.HvdkitError, MATCH):
        hk.evaluate(with_layer(Centered()), x, y, verbose=0)
    with raises_on_several(hk.HvdkitError, MATCH):
        hk.predict(with_layer(Centered()), x, verbose=0)
    only_in_training = with_layer(OwnBatchNorm())
    assert np.isfinite(hk.evaluate(only_in_training, x, y, verbose=0))
    with raises_on_several(hk.HvdkitError, "other rows of its batch in training"):
        hk.fit(only_in_training, x, y, batch_size=8, verbose=0)


def test_the_remedies_train(rng):
    """With hk.gather_rows, as one process; with loss_scope="rows", each rank on its own rows, to evaluation."""
    x, y = line(rng)
    one, expected = plain(lambda: with_layer(Centered()), x, y, batch_size=7, epochs=2)
    many, found = ported(lambda: with_layer(OfAllRanks()), x, y, batch_size=7, epochs=2)
    same_logs(found, expected)
    same_weights(many, one)
    model = with_layer(Centered())
    history = hk.fit(model, x, y, batch_size=8, validation_data=(x, y), loss_scope="rows", verbose=0)
    assert np.isfinite(history.history["val_loss"]).all()
    hk.compare_variables(model.variables)
    assert np.isfinite(hk.evaluate(model, x, y, verbose=0)).all()


def test_nothing_remains_of_the_test(rng):
    """A layer that changes its weights in training has those of plain fit."""

    def build():
        block = OwnBlock()
        block.dropout = layers.Dropout(0.0)
        return with_layer(block)

    compare(build, *line(rng), batch_size=8, epochs=2)


@pytest.mark.nightly
def test_models_that_compute_each_row_alone_train(rng, size):
    """Normalizations, random layers, cells, attention, 16-bit outputs, one row per rank, and rows that are equal."""
    x, y = line(rng, 24)
    attention = layers.MultiHeadAttention(1, 2)
    several = layers.Lambda(lambda x: attention(x, x))
    for inner in (
        [layers.BatchNormalization(synchronized=True), layers.Dropout(0.5)],
        [layers.LayerNormalization(), layers.GroupNormalization(2), layers.UnitNormalization(), OwnBlock()],
        [layers.GaussianNoise(0.1), Sampling(), OwnDropout()],
        [layers.Reshape((4, 1)), layers.LSTM(3)],
        [layers.Reshape((4, 1)), several, layers.Flatten()],
    ):
        hk.fit(with_layer(*inner), x, y, batch_size=8, verbose=0)
    hk.fit(with_layer(layers.ReLU()), x[:size], y[:size], batch_size=size, verbose=0)
    hk.fit(with_layer(layers.ReLU()), np.ones_like(x), y, batch_size=8, verbose=0)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        hk.fit(with_layer(*[layers.Dense(16, "gelu") for _ in range(8)]), x, y, batch_size=8, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
