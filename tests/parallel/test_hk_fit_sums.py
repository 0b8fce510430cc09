"""Losses and metrics that are no mean of their rows: exact, or the chief says so once, with the remedy."""

from __future__ import annotations

import keras
import tensorflow as tf
from helpers.as_one import compare, line

import hvdkit as hk

layers, losses, ops = keras.layers, keras.losses, keras.ops
SUMMED = losses.MeanSquaredError(reduction="sum")


def model_with(loss, **options):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, "sigmoid")])
    model.compile(keras.optimizers.SGD(0.1), loss, **options)
    return model


def f1(y_true, y_pred):
    return 2 * ops.sum(y_true * y_pred) / (ops.sum(y_true) + ops.sum(y_pred))


def scalar_mean(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


def gathered_dice(y_true, y_pred):
    y_true, y_pred = hk.allgather(y_true), hk.allgather(y_pred)
    return 1 - f1(y_true, y_pred)


def test_functions_that_are_no_mean_of_rows_are_named_once(rng, size, capfd):
    x = rng.normal(size=(24, 3)).astype("float32")
    y = (x[:, :2] > 0).astype("float32")
    for loss, metrics, names in [
        (losses.Dice(), [f1], ["loss 'dice'", "metric 'f1'"]),
        ("mse", [scalar_mean, "mae"], []),
        (losses.MeanSquaredError(reduction="sum"), [], []),
        (scalar_mean, [], []),
        (losses.Dice(reduction="sum"), [], []),  # warned about before
    ]:
        capfd.readouterr()
        hk.fit(model_with(loss, metrics=metrics), x, y, batch_size=8, epochs=2, verbose=0)
        output = capfd.readouterr().err
        found = [each for each in output.splitlines() if "is not the mean of the values" in each]
        expected = names if hk.is_chief() and size > 1 else []
        assert len(found) == len(expected) and all(name in output for name in expected), output
        assert all("hk.allgather(y_true)" in each for each in found)
    compare(lambda: model_with(gathered_dice), x, y, batch_size=8, epochs=2)
    assert "is not the mean" not in capfd.readouterr().err


def test_vectors_in_add_loss_and_sums_held_by_layers_are_exact(rng):
    class Endpoint(layers.Layer):
        """As a CTC layer: it adds the loss of each row."""

        def call(self, y_true, y_pred):
            self.add_loss(0.01 * ops.square(y_true - y_pred))
            return y_pred

    class Task(layers.Layer):
        """As a ranking task, with a loss object of its own."""

        def __init__(self):
            super().__init__()
            self.own_loss = losses.MeanSquaredError(reduction="sum")

        def call(self, y_true, y_pred):
            self.add_loss(0.01 * self.own_loss(y_true, y_pred))
            return y_pred

    x, y = line(rng, 21)
    for layer in (Endpoint, Task):

        def build(layer=layer):
            inputs, labels = keras.Input((3,)), keras.Input((1,))
            model = keras.Model([inputs, labels], layer()(labels, layers.Dense(1)(inputs)))
            model.compile(keras.optimizers.SGD(0.1))
            return model

        compare(build, [x, y], batch_size=8, epochs=2)


def test_numbers_in_add_loss_are_mentioned_once(rng, size, capfd):
    class Entropy(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * ops.mean(ops.square(ops.mean(x, axis=0))))
            return x

    x, y = line(rng, 24)
    model = keras.Sequential([keras.Input((3,)), Entropy(name="entropy_of_batch"), layers.Dense(1)])
    model.compile("sgd", "mse")
    hk.fit(model, x, y, batch_size=8, epochs=2, verbose=0)
    lines = [each for each in capfd.readouterr().err.splitlines() if "add_loss of 'entropy_of_batch'" in each]
    assert len(lines) == (hk.is_chief() and size > 1)


class Summing(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss((y - self(x)) ** 2, global_batch_size=8) + 0.0 * SUMMED(y, self(x))
            loss += tf.reduce_mean(tf.reduce_sum(y - self(x), axis=1))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_sums_in_a_train_step_are_named(rng, size, capfd):
    x, y = line(rng, 24)
    model = Summing([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd")
    hk.fit(model, x, y, batch_size=8, verbose=0)
    lines = [each for each in capfd.readouterr().err.splitlines() if "train_step of Summing" in each]
    assert len(lines) == (hk.is_chief() and size > 1)
    assert all("compute_average_loss in line" in each and "SUMMED (reduction='sum')" in each for each in lines)
    assert not any("reduce_sum in line" in each for each in lines)
