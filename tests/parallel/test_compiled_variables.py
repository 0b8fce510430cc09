"""Compiled steps create variables as uncompiled steps do, also within control dependencies."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.own_step import OwnStep
from helpers.tiers import at_night

import hvdkit as hk

X = np.random.default_rng(5).normal(size=(48, 8)).astype("f4")
Y = X[:, :1]


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("optimizer", at_night(("Nadam", "Adam", "Ftrl"), but=["Nadam"]))
def test_the_variables_of_optimizers(optimizer):
    """Nadam creates one with a number as its initial value."""

    def run(jit_compile):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((8,))
        model = OwnStep(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs)))
        model.compile(getattr(keras.optimizers, optimizer)(0.01), jit_compile=jit_compile)
        hk.fit(model, X, Y, batch_size=12, epochs=2, verbose=0)
        return model.get_weights()

    for one, other in zip(run(False), run(True), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("value", [2.0, np.float32(2), lambda: 2.0, "constant", "eager"])
def test_variables_with_numbers_as_initial_values(value):
    made = []
    eager = tf.constant(2.0)

    @hk.compiled
    def step(x):
        with tf.control_dependencies([tf.reduce_sum(x)]):
            if not made:
                initial = {"constant": lambda: tf.constant(2.0), "eager": lambda: eager}.get(value, lambda: value)()
                made.append(tf.Variable(initial, dtype=tf.float32))
        made[0].assign_add(1.0)
        return tf.reduce_sum(x) * made[0]

    assert [float(step(tf.ones([2]))) for _ in range(2)] == [6.0, 8.0]
