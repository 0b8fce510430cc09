"""Steps that move the weights by a first gradient and take a second one there, as SAM does (arXiv:2010.01412)."""

import contextlib
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import line, raises_on_several, same_values

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
    words = (
        r"^train_step of Published: got a step that moves .* by a gradient of this rank's rows, as SAM does, expected "
        r"the gradient of the global batch, .*; average it first, hk\.average_gradients.*; see .*as-in-sam"
    )
    before = model.get_weights()
    with raises_on_several(hk.HvdkitError, words):
        hk.fit(model, x, y, batch_size=6, verbose=0)
    if hk.size() > 1:  # before the first step
        same_values(model.get_weights(), hk.broadcast_object(before))


@pytest.fixture
def outcome(caplog, monkeypatch):
    """Return a function that runs hk.fit with a model: "error", "warning" by the chief, or None."""
    monkeypatch.setattr(logging.getLogger("hvdkit"), "propagate", True)

    def fit(model, x, y, **options):
        warn_once.cache_clear()
        caplog.clear()
        words = "by a gradient of this rank's rows, as SAM does"
        try:
            hk.fit(model, x, y, batch_size=7, verbose=0, **options)
        except hk.HvdkitError as error:
            assert words in str(error)
            return "error"
        return "warning" if any(words in text for text in caplog.messages) else None

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


class ByGradientsOfTasks(ByGradients):
    """Meta-learning: each row is a task, and moves the weights for itself."""

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        return tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        before = [tf.identity(v) for v in variables]

        def of_task(row, *totals):
            task = x[row : row + 1], y[row : row + 1]
            self.move(*task)
            second = self.gradients(*task)
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            return (row + 1, *(total + grad for total, grad in zip(totals, second, strict=True)))

        rows = tf.shape(x)[0]
        _, *totals = tf.while_loop(lambda row, *_: row < rows, of_task, (0, *map(tf.zeros_like, before)))
        grads = [total / tf.cast(rows, tf.float32) for total in totals]
        self.optimizer.apply_gradients(zip(grads, variables, strict=True))
        return {"loss": tf.constant(0.0)}


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


@pytest.mark.nightly
@pytest.mark.ranks(1, 2)
def test_moves_by_a_gradient_of_the_rows_of_a_rank_are_refused_or_get_a_warning(rng, outcome):
    x, y = line(rng)
    expected = dict.fromkeys((ByGradients, ByGradientsOfAFunction, ByAFunction), "error")
    expected[ByGradientsOfTasks] = "warning" if hk.is_chief() else None
    expected |= dict.fromkeys((ByAveragedGradients, ByReducedGradients, ByAveragedGradientsOfAFunction, ByNothing))
    for kind, wanted in expected.items():
        inputs = keras.Input((3,))
        model = kind(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        assert outcome(model, x, y) == (wanted if hk.size() > 1 else None), kind
        if kind is ByGradients:
            assert outcome(model, x, y, loss_scope="rows") is None


class Keeps(keras.Model):
    """Keeps a value for each step, which depends on the gradient by ``function``."""

    function = staticmethod(tf.linalg.global_norm)

    def build(self, input_shape):
        super().build(input_shape)
        self.kept = tf.Variable(0.0, trainable=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.kept.assign(0.9 * self.kept + 0.1 * self.function(gradients))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_state_that_is_not_linear_in_a_gradient_is_refused_before_the_first_step(rng):
    x, y = line(rng)
    functions = {
        "norm": tf.linalg.global_norm,
        "square": lambda grads: tf.reduce_sum(grads[0] * grads[0]),
        "ratio": lambda grads: 1.0 / grads[1][0],
        "averaged": lambda grads: tf.linalg.global_norm(hk.average_gradients(grads)),
        "linear": lambda grads: grads[1][0] * 2.0 - grads[0][0, 0] / 3.0,
    }
    for name, function in functions.items():
        results = []
        for fit in (keras.Model.fit, hk.fit):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((3,))
            model = Keeps(inputs, keras.layers.Dense(1)(inputs))
            model.function = function if fit is hk.fit or name != "averaged" else tf.linalg.global_norm
            model.compile(keras.optimizers.SGD(0.1), "mse")
            is_refused = fit is hk.fit and name in ("norm", "square", "ratio")
            words = r"^train_step of Keeps: got a step that keeps in .*\.kept what is not linear in a gradient"
            with raises_on_several(hk.HvdkitError, words) if is_refused else contextlib.nullcontext():
                fit(model, x[:20], y[:20], batch_size=7, shuffle=False, verbose=0)
            results.append(float(model.kept))
        if name in ("averaged", "linear"):
            assert results[1] == pytest.approx(results[0], rel=1e-5), name
