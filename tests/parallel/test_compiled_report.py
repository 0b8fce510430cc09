"""The log line of a compiled step lists what of the program is not compiled, and nothing of hvdkit's own."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.own_step import OwnStep

import hvdkit as hk

layers = keras.layers
X = np.random.default_rng(5).normal(size=(48, 8)).astype("f4")
Y = X[:, :1]


class Largest(keras.metrics.Metric):
    """A sum over batches, whose update hvdkit tests in the first step."""

    def __init__(self):
        super().__init__(name="large")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_pred > y_true, tf.float32)))

    def result(self):
        return self.total


def fitted(model, **options):
    """Train on a dataset, of which hvdkit keeps the first rows in the first step."""
    model.compile(keras.optimizers.SGD(0.01), jit_compile=True, **options)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)
    hk.fit(model, data, epochs=2, verbose=0)


def functional(kind=keras.Model, hidden=16):
    inputs = keras.Input((8,))
    return kind(inputs, layers.Dense(1)(layers.Dense(hidden, "tanh")(inputs)))


@pytest.mark.parametrize("kind", [keras.Model, OwnStep])
def test_checks_of_hvdkit_are_not_listed(kind, lines):
    fitted(functional(kind), **({} if kind is OwnStep else {"loss": "mse"}))
    assert hk.rank() or "XLA compiles" in lines.text
    assert "If " not in lines.text and "PyFunc" not in lines.text


def test_the_branch_of_a_loss_that_may_need_all_rows_is_listed_and_not_the_check(lines):
    def contrastive(y_true, y_pred):
        return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)

    fitted(functional(), loss=contrastive, metrics=[Largest()])
    assert hk.rank() or "an exchange between ranks inside" in lines.text
    assert "PyFunc" not in lines.text


def test_a_branch_of_the_program_is_listed(lines):
    class Noted(keras.Model):
        def call(self, x):
            noted = tf.cond(
                tf.reduce_sum(x) > 1e9, lambda: tf.ensure_shape(tf.py_function(abs, [x], x.dtype), x.shape), lambda: x
            )
            return tf.reduce_sum(noted, axis=1, keepdims=True) * self.scale

        def build(self, shape):
            self.scale = self.add_weight(shape=(1,), initializer="ones")

    fitted(Noted(), loss="mse")
    assert hk.rank() or "inside: XLA has no kernel" in lines.text


def test_convolutions_with_weights_of_which_ranks_exchange_the_sum(lines):
    """The backward pass needs the kernel's shape, which the forward pass before the exchange has computed."""
    signal = X.reshape(48, 4, 2)
    kinds = np.arange(48) % 3

    def run(jit_compile):
        keras.utils.set_random_seed(3)
        pooled = [layers.Conv1D(6, 3, padding="same"), layers.GlobalAveragePooling1D()]
        model = keras.Sequential([keras.Input((4, 2)), *pooled, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit_compile)
        hk.fit(model, signal, kinds, sample_weight=np.linspace(0.5, 1.5, 48), batch_size=12, verbose=0)
        return model.get_weights()

    for one, other in zip(run(False), run(True), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert hk.rank() or "XLA compiles" in lines.text
    assert "not compiled" not in lines.text, lines.text
