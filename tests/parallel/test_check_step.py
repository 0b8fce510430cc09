"""hk.check_step: equal for programs that are right, named for others, and without a trace."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import compare, line, same_values

import hvdkit as hk
from hvdkit.layers import batch_norm

layers = keras.layers


def model_with(*inner, cls=keras.Sequential, optimizer="adam", loss="mse", **options):
    model = cls([keras.Input((3,)), *inner, layers.Dense(1)])
    model.compile(optimizer, loss, **options)
    return model


class Own(keras.Sequential):
    """A train_step as in Keras's guide, with its own tracker and a log that does not come from a metric."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "square": loss**0.5 * 0 + loss}

    @property
    def metrics(self):
        return [self.tracker]


class Plain(Own):
    """A train_step that returns its loss only, which no metric tracks."""

    def train_step(self, data):
        return {"loss": super().train_step(data)["square"]}

    @property
    def metrics(self):
        return []


class ByRank(keras.Sequential):
    """Wrong on purpose: each rank has another loss."""

    def compute_loss(self, *arguments, **named):
        return super().compute_loss(*arguments, **named) * (hk.rank() + 1)


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
def test_programs_that_are_right_are_equal(rng):
    """Unseeded weights, dropout, normalization, own steps, 16 bits, sums, shards; of uneven batches."""
    x, y = line(rng, 24)
    weights = lambda: [layers.Dense(8, "relu"), layers.Dropout(0.5)]  # noqa: E731
    table = keras.Sequential([keras.Input((1,)), hk.layers.ShardedEmbedding(9, 2), layers.Flatten(), layers.Dense(1)])
    table.compile("sgd", "mse")
    for model, inputs in (
        (model_with(*weights(), metrics=["mae", keras.metrics.RootMeanSquaredError(name="rmse")]), x),
        (model_with(layers.Dense(8), layers.BatchNormalization(synchronized=True), layers.ReLU()), x),
        (model_with(layers.Dense(8, dtype="mixed_bfloat16"), loss=keras.losses.MeanSquaredError("sum")), x),
        (model_with(layers.Dense(4), cls=Own, optimizer="sgd"), x),
        (model_with(layers.Dense(4), cls=Plain, optimizer=hk.DistributedOptimizer(keras.optimizers.SGD(0.1))), x),
        (table, np.arange(24)[:, None] % 9),
    ):
        result = hk.check_step(model, inputs, y, batch_size=10, steps=2)
        assert result.is_equal and result.steps == 2, f"{result}"
        assert all(each.verdict != "random" for each in result.values), f"{result}"
        kinds = {each.kind for each in result.values}
        assert {"loss", "gradient", "variable"} <= kinds and len(set(hk.allgather_object(f"{result}"))) == 1
    assert any("not compared" in each and "embedding" in each for each in result.notes), f"{result.notes}"


def test_logs_that_are_no_numbers_are_not_compared(rng):
    class Staged(Own):
        def train_step(self, data):
            return {**super().train_step(data), "stage": tf.constant("first")}

    x, y = line(rng, 24)
    result = hk.check_step(model_with(layers.Dense(4), cls=Staged, optimizer="sgd"), x, y, batch_size=10)
    assert result.is_equal, f"{result}"
    assert "stage" not in {each.name for each in result.values}


@pytest.mark.nightly
@pytest.mark.ranks(2)
def test_what_differs_is_named_with_its_cause(rng):
    x, y = line(rng, 24)
    y = y + 3  # a batch that is not centred
    for model, kinds, cause in (
        (model_with(cls=ByRank), {"loss", "gradient"}, "or it contains hk.rank()"),
        (model_with(layers.Dense(4), layers.BatchNormalization()), {"state"}, "pass synchronized=True"),
    ):
        result = hk.check_step(model, x, y, batch_size=12)
        found = {each.kind for each in result.values if each.verdict == "different"}
        assert not result.is_equal and kinds <= found and cause in f"{result}", f"{result}"
    dice = keras.Sequential([keras.Input((3,)), layers.Dense(1, "sigmoid")])
    dice.compile("sgd", keras.losses.Dice())
    positive = (y > 3).astype("float32")
    assert hk.check_step(dice, x, positive).is_equal
    assert not hk.check_step(dice, x, positive, loss_scope="rows").is_equal
    noisy = hk.check_step(model_with(layers.Lambda(lambda z: z + keras.random.normal(keras.ops.shape(z)))), x, y)
    assert noisy.is_equal and "steps draw random numbers" in f"{noisy}" and "not comparable" in f"{noisy}"


@pytest.mark.nightly
def test_nothing_remains_of_a_check(rng):
    """Weights, slots, seeds, metrics, the optimizer itself: training afterwards is that of one process."""
    x, y = line(rng, 24)

    def build():
        model = model_with(layers.Dense(4, "relu"), layers.Dropout(0.0), layers.BatchNormalization(synchronized=True))
        before = [np.asarray(v).copy() for v in model.variables]
        optimizer = model.optimizer
        if is_checked:
            assert hk.check_step(model, x, y, steps=2).is_equal
        same_values(model.variables, before)
        assert model.optimizer is optimizer and not optimizer.built and not hasattr(model, "history")
        return model

    is_checked = False
    unchecked, _ = compare(build, x, y, batch_size=8)
    is_checked = True
    _, checked = compare(build, x, y, batch_size=8)
    same_values(checked.weights, unchecked.weights, rtol=2e-4, atol=2e-5)
    slots = [np.asarray(v).copy() for v in checked.optimizer.variables]
    optimizer = checked.optimizer
    assert hk.check_step(checked, x, y).is_equal and checked.optimizer is optimizer
    same_values(optimizer.variables, slots)
    hk.fit(checked, x, y, batch_size=8, verbose=0)


def test_statistics_are_compared_with_those_of_keras(rng, monkeypatch):
    """And layers are not synchronized afterwards: one rank can train the model alone."""
    x, y = line(rng, 24)
    moments = batch_norm.global_moments

    def shifted(*arguments):
        mean, variance = moments(*arguments)
        return mean + 0.1, variance

    model = model_with(layers.BatchNormalization(synchronized=True))
    monkeypatch.setattr(batch_norm, "global_moments", shifted)
    result = hk.check_step(model, x, y, batch_size=12)
    assert not result.is_equal, f"{result}"
    if hk.is_chief():
        model.fit(x, y, verbose=0)


def test_bad_arguments_are_errors_on_every_rank(rng):
    x, y = line(rng, 24)
    unbuilt = keras.Sequential([layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    built = model_with()
    for error, match, arguments, named in (
        (ValueError, "model: got one that is not built.*Input", (unbuilt, x, y), {}),
        (ValueError, "not compiled", (keras.Sequential([keras.Input((3,)), layers.Dense(1)]), x, y), {}),
        (TypeError, "x: got .*Dataset, expected arrays", (built, tf.data.Dataset.from_tensor_slices((x, y))), {}),
        (ValueError, "x: got 24 rows, expected at least 60", (built, x, y), {"batch_size": 20, "steps": 3}),
        (ValueError, "steps: got 0", (built, x, y), {"steps": 0}),
    ):
        with pytest.raises(error, match=match):
            hk.check_step(*arguments, **named)
