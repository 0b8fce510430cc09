"""Ranks that train without combining gradients are noticed: in fit, in loops, at the end of the program."""

from __future__ import annotations

import gc
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.jobs import run

from hvdkit.cluster.lone_training import LoneTraining

X, Y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")


@pytest.fixture
def lines(monkeypatch):
    """Return the reports, as a list that grows."""
    found = []
    logger = logging.getLogger("hvdkit")
    monkeypatch.setattr(logger, "warning", lambda message, *values: found.append(message % values))
    return found


@pytest.fixture
def watch():
    watch = LoneTraining()
    watch.begin(2)
    yield watch
    watch.is_combined = True  # ends the thread


def compiled(**options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def loop(traced, goes_on):
    """Train twice, and as long as it ``goes_on()``, with an optimizer that no model has."""
    model, optimizer = compiled(), keras.optimizers.Adam()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step = tf.function(step) if traced else step
    step(X, Y)
    while goes_on(optimizer):
        step(X, Y)
    step(X, Y)
    return step


def test_fit_is_reported_after_its_first_epoch(watch, lines):
    class Epoch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert epoch or not lines

        def on_train_batch_end(self, batch, logs=None):
            if lines:
                self.model.stop_training = True

    compiled().fit(X, Y, epochs=100_000, callbacks=[Epoch()], verbose=0)  # ends with the report
    assert len(lines) == 1
    assert "each of 2 ranks trains its own model" in lines[0] and "hk.fit" in lines[0]


@pytest.mark.parametrize("traced", [False, True])
def test_a_loop_is_reported_at_the_end(watch, lines, traced):
    def is_unseen(optimizer):
        return optimizer not in watch._first

    kept = loop(traced, is_unseen)  # until the first look, as longer programs do
    assert not lines
    watch.end()
    watch.end()
    assert len(lines) == 1 and kept
    assert lines[0].removeprefix("training: ") in watch.doubt()
    watch.is_combined = True  # a later part of the program is right
    assert not watch.doubt()


def test_a_short_loop_under_tf_function_is_reported_at_the_end(watch, lines):
    kept = loop(True, lambda _: False)
    watch.end()
    assert len(lines) == 1 and kept


def test_one_short_fit_is_reported_at_the_end(watch, lines):
    model = compiled()
    model.fit(X, Y, verbose=0)
    watch.end()
    assert len(lines) == 1 and model


def test_steps_count_from_what_is_restored(watch, lines):
    model = compiled()
    model.make_train_function()
    model.optimizer.iterations.assign(5)
    watch.note_restored([model.optimizer.iterations.value, tf.Variable([1.0])])
    watch.end()
    assert not lines
    model.fit(X, Y, verbose=0)
    watch.end()
    assert len(lines) == 1


def test_a_fit_of_the_world_before_is_not_reported_in_the_next(watch, lines):
    model = compiled()
    model.fit(X, Y, verbose=0)
    watch.end()
    assert len(lines) == 1
    del model
    gc.collect()
    watch.begin(2)
    watch.end()
    assert len(lines) == 1

    model = compiled()
    model.fit(X, Y, verbose=0)
    watch.begin(2)
    model.evaluate(X, Y, verbose=0)
    watch.add_collective([[1.0]])
    watch.end()
    assert len(lines) == 1
    watch.begin(2)
    watch.add_collective([[1.0, 2.0]])  # gradients may be lists
    model.fit(X, Y, verbose=0)
    watch.end()
    assert len(lines) == 1
    watch.begin(2)
    model.fit(X, Y, verbose=0)
    watch.end()
    assert len(lines) == 2


@pytest.mark.nightly
def test_programs_that_only_evaluate_or_that_combine_are_not_reported(lines, tmp_path):
    """In a separate process: at the end, models of other tests may still exist."""
    code = f"""
import gc, keras, numpy as np
import tensorflow as tf
from hvdkit.cluster.lone_training import LoneTraining
X, Y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
watch = LoneTraining()
def fit_line():
    slope, intercept, optimizer = tf.Variable(1.0), tf.Variable(1.0), keras.optimizers.SGD(0.1)
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = slope + intercept
        gradients = tape.gradient(loss, [slope, intercept])
        watch.add_collective(gradients)  # as hk.grouped_allreduce does
        optimizer.apply(gradients, [slope, intercept])
    watch.begin(2)
    step()
    watch.end()
fit_line()
gc.collect()
print("numbers", flush=True)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.optimizer.iterations.assign(5)
model.save({str(tmp_path / "model.keras")!r})
watch = LoneTraining()
watch.begin(2)
loaded = keras.saving.load_model({str(tmp_path / "model.keras")!r})
assert int(loaded.optimizer.iterations) == 5
loaded.evaluate(X, Y, verbose=0)
loaded.predict(X, verbose=0)
watch.end()
print("evaluated", flush=True)
watch.begin(2)
watch.add_collective([tf.ones((3, 1))])
loaded.fit(X, Y, epochs=2, verbose=0)
watch.end()
print("combined", flush=True)
watch.begin(2)
watch.add_collective([2.5, np.float32(2.5), tf.constant([2.5])])  # losses and metrics are no gradients
loaded.fit(X, Y, epochs=2, verbose=0)
watch.end()
"""
    output = run(code).output
    before, _, after = output.partition("combined")
    assert "numbers" in before and "evaluated" in before and "no gradients" not in before, output
    assert "no gradients have been combined" in after, output
