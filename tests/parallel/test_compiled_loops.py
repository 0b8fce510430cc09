"""Loops and branches of a step: XLA compiles their gradients in the form that they have in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_nests
from helpers.tiers import at_night

import hvdkit as hk

layers = keras.layers
RNG = np.random.default_rng(9)
X = RNG.normal(size=(48, 6, 2)).astype("f4")
X[np.arange(6) >= RNG.integers(2, 7, 48)[:, None]] = 0.0  # padding
Y = X.sum(axis=(1, 2))[:, None]


class Halving(keras.layers.Layer):
    """A loop and a branch of the user's own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        (small,) = tf.while_loop(
            lambda y: self.scale > 0.1, lambda y: (tf.tanh(y) * self.scale,), [x], maximum_iterations=3
        )
        return tf.cond(self.scale > 0.9, lambda: tf.tanh(small) * self.scale, lambda: -tf.sin(small))


class Slices(keras.layers.Layer):
    """The gradient of tf.slice, which TensorFlow computes by another operation for XLA."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(2,), initializer="ones")

    def call(self, x):
        return tf.slice(x * self.scale, [0, 1, 0], [-1, 4, 2]) * 2.0


class SlicesInLoop(Slices):
    """The same within a loop."""

    def call(self, x):
        return tf.while_loop(lambda n, y: n < 2, lambda n, y: (n + 1, self.halved(y)), [0, x])[1]

    def halved(self, x):
        return tf.pad(super().call(x), [[0, 0], [1, 1], [0, 0]]) * 0.25


class Noted(Slices):
    """Branches that run outside of XLA, whose gradients need what only one of them computes."""

    def call(self, x):
        def noted():
            absolute = tf.ensure_shape(tf.numpy_function(np.abs, [x], x.dtype), x.shape)
            return tf.tanh(x * self.scale) + absolute

        @tf.function
        def inner(x):
            return tf.cond(self.scale[0] > 0.5, noted, lambda: tf.sin(x * self.scale))

        return tf.cond(self.scale[1] > 0.8, lambda: inner(x) * 2.0, lambda: tf.exp(x * self.scale)) + inner(x)


def model_of(*hidden, last=True):
    output = [layers.Flatten(), layers.Dense(1)] if last else [layers.Dense(1)]
    return keras.Sequential([keras.Input((6, 2)), *hidden, *output])


MODELS = {
    "stacked": (lambda: model_of(layers.LSTM(8, return_sequences=True), layers.GRU(6)), Y),
    "masked": (lambda: model_of(layers.Masking(), layers.LSTM(8, return_sequences=True), layers.GRU(6)), Y),
    "bidirectional": (lambda: model_of(layers.Masking(), layers.Bidirectional(layers.GRU(4)), layers.Dense(3)), Y),
    "labels": (lambda: model_of(layers.Masking(), layers.LSTM(8, return_sequences=True), last=False), X[..., :1]),
    "two_of_labels": (
        lambda: model_of(*(layers.GRU(5, return_sequences=True) for _ in range(2)), last=False),
        X[..., :1],
    ),
    "own": (lambda: model_of(Halving(), layers.Dense(16, "tanh")), Y),
    "slices": (lambda: model_of(Slices(), layers.Dense(16, "tanh")), Y),
}


def fitted(make, y, *, jit_compile):
    keras.utils.set_random_seed(3)
    model = make()
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=jit_compile)
    history = hk.fit(model, X, y, batch_size=12, epochs=2, verbose=0)
    return {"history": history.history, "weights": model.get_weights()}


@pytest.mark.ranks(2)
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_loops_and_branches_are_compiled(name, lines):
    make, y = MODELS[name]
    plain = fitted(make, y, jit_compile=False)
    same_nests(plain, fitted(make, y, jit_compile=True))
    assert hk.rank() or "XLA compiles" in lines.text
    assert "not compiled: a program" not in lines.text and "inside" not in lines.text, lines.text


@pytest.mark.parametrize("layer", at_night([Noted, SlicesInLoop], but=[SlicesInLoop]))
def test_what_stays_outside_has_the_gradient_of_tensorflow(layer):
    plain, compiled = (
        fitted(lambda: model_of(layer(), layers.Dense(16, "tanh")), Y, jit_compile=jit) for jit in (False, True)
    )
    same_nests(plain, compiled)


def test_a_slice_in_a_step_that_is_too_small_for_a_program(lines):
    w = tf.Variable(tf.ones([6]))

    @hk.compiled
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.slice(w * x, [1], [3]))
        (gradient,) = hk.average_gradients([tape.gradient(loss, w)])
        return gradient

    assert step(tf.constant([1.0, 2, 3, 4, 5, 6])).numpy().tolist() == [0, 2, 3, 4, 0, 0]
    assert hk.rank() or "XLA compiles nothing" in lines.text


def test_a_function_for_xla_with_an_exchange_is_refused():
    @tf.function(jit_compile=True)
    def inner(x):
        return hk.allreduce(x)

    with pytest.raises(hk.HvdkitError, match="jit_compile=False"):
        hk.compiled(lambda x: inner(x) + 1.0)(tf.ones([3]))
    outer = tf.function(hk.compiled(lambda x: hk.allreduce(x) + 1.0), jit_compile=True)
    with pytest.raises(hk.HvdkitError, match="jit_compile=False"):
        outer(tf.ones([3]))
