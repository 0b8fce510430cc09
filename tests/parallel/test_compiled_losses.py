"""The losses of a model with several outputs are the same with XLA, which compiles a step for fixed shapes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_nests

import hvdkit as hk

layers = keras.layers
RNG = np.random.default_rng(9)
X = RNG.normal(size=(50, 8)).astype("f4")
Y = {"number": X[:, :1], "kind": X[:, :3].argmax(axis=1)}
LOSSES = {"number": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def two_outputs(wrap=lambda optimizer: optimizer, **options):
    inputs = keras.Input((8,))
    outputs = {"number": layers.Dense(1, name="number")(inputs), "kind": layers.Dense(3, name="kind")(inputs)}
    model = keras.Model(inputs, outputs)
    model.compile(wrap(keras.optimizers.SGD(0.1)), LOSSES, **options)
    return model


def batches(number, *, has_fixed_rows=False):
    """Return batches; without ``has_fixed_rows``, the last one may have fewer rows."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(number, drop_remainder=has_fixed_rows)


def results(data, *, jit_compile):
    keras.utils.set_random_seed(3)
    model = two_outputs(jit_compile=jit_compile)
    history = hk.fit(model, data, epochs=2, verbose=0).history
    return history, hk.evaluate(model, data, verbose=0, return_dict=True), model.get_weights()


@pytest.mark.nightly
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("has_fixed_rows", [False, True])
def test_the_losses_of_several_outputs(has_fixed_rows):
    """Keras weights them by the rows of a batch only if the shapes of the data declare them."""
    data = batches(14, has_fixed_rows=has_fixed_rows)
    plain = results(data, jit_compile=False)
    assert "kind_loss" in plain[0]
    same_nests(plain, results(data, jit_compile=True))


@pytest.mark.nightly
def test_uneven_shares_of_batches_with_and_without_fixed_rows():
    model = two_outputs(jit_compile=True)
    reference = two_outputs()
    reference.set_weights(model.get_weights())
    for has_fixed_rows in (True, False, True):  # one after the other, with equal shapes
        data = batches(15, has_fixed_rows=has_fixed_rows)
        one = hk.fit(model, data, verbose=0).history
        other = hk.fit(reference, data, verbose=0).history
        same_nests(one, other)
    same_nests(model.get_weights(), reference.get_weights())


@pytest.mark.nightly
def test_plain_fit_with_a_callback_of_hvdkit():
    def run(jit_compile):
        keras.utils.set_random_seed(3)
        model = two_outputs(hk.DistributedOptimizer, jit_compile=jit_compile)
        return model.fit(batches(14), epochs=2, verbose=0, callbacks=[hk.callbacks.MetricAverage()]).history

    same_nests(run(False), run(True))
