"""Steps that move the weights by a first gradient and take a second one there, as SAM does (arXiv:2010.01412)."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import line, raises_on_several

import hvdkit as hk
from hvdkit.cluster.logs import warn_once


class SharpnessAware(keras.Model):
    """The recipe of docs/pitfalls.md."""

    average = staticmethod(hk.average_gradients)

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        first = self.average(tape.gradient(loss, variables))
        norm = tf.linalg.global_norm(first)
        moves = [0.05 * grad / (norm + 1e-12) for grad in first]
        for variable, move in zip(variables, moves, strict=True):
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        second = tape.gradient(loss, variables)
        for variable, move in zip(variables, moves, strict=True):
            variable.assign_sub(move)
        self.optimizer.apply_gradients(zip(second, variables, strict=True))
        return {"loss": loss}


def test_two_gradients_equal_one_process(rng):
    x, y = rng.normal(size=(22, 4)).astype("f4"), rng.normal(size=(22, 1)).astype("f4")

    def compiled():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = SharpnessAware(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    for batch_size in (6, 7):  # neither divides the rows; 7 doesn't divide among the ranks
        options = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
        reference, model = compiled(), compiled()
        reference.fit(x, y, **options)  # on the whole batch on each rank
        hk.fit(model, x, y, **options)
        for one, other in zip(model.trainable_variables, reference.trainable_variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-6, err_msg=one.path)


class Published(SharpnessAware):
    """The step as it is written for one process."""

    average = staticmethod(lambda grads: grads)


def test_a_step_with_a_gradient_of_its_own_rows_gets_the_remedy(rng):
    x, y = rng.normal(size=(22, 4)).astype("f4"), rng.normal(size=(22, 1)).astype("f4")
    inputs = keras.Input((4,))
    model = Published(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    words = r"after the first update: .*, as SAM does, average that with hk\.average_gradients first; see .*as-in-sam"
    with raises_on_several(hk.CollectiveMismatchError, words):
        hk.fit(model, x, y, batch_size=6, verbose=0)


@pytest.fixture
def warned(caplog, monkeypatch):
    """Return a function that runs hk.fit with a model, and returns whether the chief has warned of moved weights."""
    monkeypatch.setattr(logging.getLogger("hvdkit"), "propagate", True)

    def fit(model, x, y):
        warn_once.cache_clear()
        caplog.clear()
        hk.fit(model, x, y, batch_size=7, verbose=0)
        return any("by a gradient of this rank's rows, as SAM does" in text for text in caplog.messages)

    return fit


class Moves(keras.Model):
    """A model with a step that assigns weights and restores them."""

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        variables = self.trainable_variables
        before = [tf.identity(v) for v in variables]
        self.move(*data)
        second = self.gradients(*data)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        self.optimizer.apply_gradients(zip(second, variables, strict=True))
        return {"loss": tf.constant(0.0)}


class ByGradients(Moves):
    """SAM that restores the weights, so that they are equal on all ranks after the step."""

    def move(self, x, y):
        grads = self.gradients(x, y)
        norm = tf.linalg.global_norm(grads)
        for variable, grad in zip(self.trainable_variables, grads, strict=True):
            variable.assign(variable + 0.05 * grad / norm)


class ByGradientsOfAFunction(ByGradients):
    gradients = tf.function(Moves.gradients)


class ByAFunction(ByGradients):
    move = tf.function(ByGradients.move)


class ByAveragedGradients(ByGradients):
    def gradients(self, x, y):
        return hk.average_gradients(super().gradients(x, y))


class ByReducedGradients(ByGradients):
    def gradients(self, x, y):
        return [hk.allreduce(grad) for grad in super().gradients(x, y)]


class ByAveragedGradientsOfAFunction(ByAveragedGradients):
    gradients = tf.function(ByAveragedGradients.gradients)


class ByNothing(Moves):
    """What steps do with values that do not depend on a gradient of the batch."""

    def move(self, x, y):
        del y
        for variable in self.trainable_variables:
            variable.assign(tf.clip_by_value(variable, -1.0, 1.0))  # a constraint
            variable.assign(0.99 * variable + 0.01 * tf.ones(variable.shape))  # towards another network
            variable.assign_add(0.01 * tf.random.normal(variable.shape))  # noise
        kernel = self.trainable_variables[0]
        with tf.GradientTape() as tape:
            penalty = tf.reduce_sum(tf.square(kernel)) / tf.cast(tf.shape(x)[0], tf.float32)
        kernel.assign(kernel - 0.01 * tape.gradient(penalty, kernel))  # of the weights alone


@pytest.mark.ranks(1, 2)
def test_moves_by_a_gradient_of_the_rows_of_a_rank_get_a_warning(rng, warned):
    x, y = line(rng)
    own = [ByGradients, ByGradientsOfAFunction, ByAFunction]
    found = []
    for kind in (*own, ByReducedGradients, ByAveragedGradients, ByAveragedGradientsOfAFunction, ByNothing):
        inputs = keras.Input((3,))
        model = kind(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        if warned(model, x, y):
            found.append(kind)
    assert found == (own if hk.size() > 1 and hk.is_chief() else [])
