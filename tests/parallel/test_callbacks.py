"""Callbacks of fit on ranks that differ: no validation data, several steps per execution, random states."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import raises_on_several

import hvdkit as hk


def model_of(rate=0.0, **compile_options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"], jit_compile=False, **compile_options)
    return model


@pytest.mark.core
def test_metrics_count_every_sample_once(rank, size):
    """Rank r validates on 3 r rows, the chief on none: all ranks report the metrics of one process on all rows."""
    model = model_of()
    model.compile(model.optimizer, "mse", metrics=["mae", keras.metrics.AUC()], jit_compile=False)
    counts = [3 * r if size > 1 else 8 for r in range(size)]
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(sum(counts), 2)).astype("f4"), rng.integers(0, 2, (sum(counts), 1)).astype("f4")
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    data = tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(4)
    history = model.fit(
        x * 3,
        y,
        epochs=2,
        validation_data=data,
        callbacks=[hk.callbacks.MetricAverage(), keras.callbacks.EarlyStopping("val_loss", patience=5)],
        verbose=0,
    ).history
    model.reset_metrics()
    expected = model.evaluate(x, y, batch_size=len(x), verbose=0, return_dict=True)
    for name, value in expected.items():
        assert history[f"val_{name}"] == pytest.approx([value] * 2, rel=1e-5)
    model.reset_metrics()
    if counts[rank]:
        model.evaluate(x[mine], y[mine], verbose=0)
    assert hk.callbacks.MetricAverage.results(model)["mae"] == pytest.approx(expected["mae"], rel=1e-5)


def test_a_metric_with_a_value_for_each_class(rank, size):
    """Keras logs the array of such a metric."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(24, 2)).astype("f4")
    y = np.eye(3, dtype="f4")[rng.integers(0, 3, 24)]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
    metrics = [keras.metrics.F1Score(average=None, name="f1"), "accuracy"]
    model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.0)), "categorical_crossentropy", metrics=metrics)
    callbacks = [hk.callbacks.BroadcastInitial(), hk.callbacks.MetricAverage()]
    mine = slice(rank, None, size)
    history = model.fit(
        x[mine], y[mine], validation_data=(x[mine], y[mine]), callbacks=callbacks, batch_size=6, verbose=0
    ).history
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    for name, value in expected.items():
        np.testing.assert_allclose(history[name], [value], rtol=1e-5)
        np.testing.assert_allclose(history[f"val_{name}"], [value], rtol=1e-5)


def test_a_bad_loss_is_named_with_its_step_under_steps_per_execution():
    model = model_of(0.1, steps_per_execution=5)
    y = np.zeros((20, 1), "f4")
    y[12] = np.nan
    with pytest.raises(hk.NonFiniteError, match=f"step 15 on rank {hk.rank()}"):
        model.fit(
            np.zeros((20, 2)),
            y,
            batch_size=1,
            shuffle=False,
            callbacks=[hk.callbacks.StopOnNonFinite()],
            verbose=0,
        )


def test_a_hand_written_loop_continues_its_log(capfd):
    before, log = hk.callbacks.StepLog(8, every=4), hk.callbacks.StepLog(8, every=4)
    for step in range(1, 7):
        before.step(step, 0.5)
    log.restore(json.loads(json.dumps(before.state)))
    capfd.readouterr()
    for step in range(7, 13):
        log.step(step, 0.5)
    printed = capfd.readouterr().err
    assert printed.count("loss") == (2 if hk.is_chief() else 0)
    assert ("step 8," in printed) == ("step 12," in printed) == hk.is_chief()


def test_initial_broadcast_leaves_random_states_apart():
    keras.utils.set_random_seed(hk.rank())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    x = np.ones((4, 2), "f4")
    model.fit(x, x[:, :1], callbacks=[hk.callbacks.BroadcastInitial()], verbose=0)
    assert hk.compare_variables(model.trainable_variables)
    states = hk.allgather_object([v.numpy().tolist() for v in model.variables if v.name == "seed_generator_state"])
    assert len({str(state) for state in states}) == hk.size()


ROWS = np.random.default_rng(6).normal(size=(24, 3)).astype("f4")


def train(rows, *callbacks, epochs=1):
    """Train a new model with a new optimizer, as in a new process."""
    model = model_of(0.02, run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    model.fit(rows[:, :2], rows[:, 2:], batch_size=1, shuffle=False, epochs=epochs, callbacks=callbacks, verbose=0)
    return model


def test_divergence_in_fit_ends_it_on_every_rank(rank, size):
    class Tamper(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 6 and rank == size - 1:
                self.model.layers[0].kernel.assign_add([[0.0], [1e-3]])

    words = r"kernel, on rank .*; first known to differ at step 8, last .* step 4;"
    with raises_on_several(hk.CollectiveMismatchError, words):
        train(ROWS, Tamper(), hk.callbacks.StopOnDivergence(every=4))
    with pytest.raises(ValueError, match="every"):
        hk.callbacks.StopOnDivergence(every=0)
