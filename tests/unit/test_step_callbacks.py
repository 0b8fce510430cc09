"""Callbacks that count steps: warm-up, log lines, non-finite losses, and their states in a continued run."""

from __future__ import annotations

import gc
import json

import keras
import numpy as np
import pytest
from helpers.as_one import same_values
from helpers.tiers import after_core

import hvdkit as hk
from hvdkit.keras.step_callbacks import stateful_callbacks

hk.init()
ROWS = np.random.default_rng(6).normal(size=(24, 3)).astype("f4")


def model_of(rate=0.0, **compile_options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"], jit_compile=False, **compile_options)
    return model


@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_callbacks_count_steps_not_calls(steps_per_execution):
    model = model_of(0.1, steps_per_execution=steps_per_execution)
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append((batch, float(self.model.optimizer.learning_rate)))

    x = np.zeros((20, 2), "f4")
    warmup = hk.callbacks.LearningRateWarmup(10, scale=5.0)
    model.fit(x, x[:, :1], batch_size=1, callbacks=[warmup, Watch()], verbose=0)
    for end, rate in rates:
        start = end - steps_per_execution + 1
        assert rate == pytest.approx(0.1 * (1 + 4 * min(start / 10, 1.0)), rel=1e-5)


class Recorder(keras.callbacks.Callback):
    """Saves model, optimizer and callbacks after ``save_at`` steps, before other callbacks, and records the rates."""

    def __init__(self, save_at=None, others_lower_at=None):
        super().__init__()
        self.save_at, self.others_lower_at = save_at, others_lower_at
        self.rates, self.saved = [], None

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        self.rates.append(float(optimizer.learning_rate))
        if len(self.rates) == self.others_lower_at:
            optimizer.learning_rate = 0.001
        if len(self.rates) == self.save_at:
            for callback in stateful_callbacks(self.model):
                callback.count(batch)
            values = [v.numpy().copy() for v in [*self.model.variables, *optimizer.variables]]
            self.saved = values, json.dumps([c.state for c in stateful_callbacks(self.model)])
            self.model.stop_training = True


class Restorer(keras.callbacks.Callback):
    """Restores a Recorder's state when training begins."""

    def __init__(self, saved):
        super().__init__()
        self.saved = saved

    def on_train_begin(self, logs=None):
        values, states = self.saved
        for variable, value in zip([*self.model.variables, *self.model.optimizer.variables], values, strict=True):
            variable.assign(value)
        for callback, state in zip(stateful_callbacks(self.model), json.loads(states), strict=True):
            callback.restore(state)


def train(rows, *callbacks, epochs=1):
    """Train a new model with a new optimizer, as in a new process."""
    model = model_of(0.02, run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    model.fit(rows[:, :2], rows[:, 2:], batch_size=1, shuffle=False, epochs=epochs, callbacks=callbacks, verbose=0)
    return model


@pytest.fixture(scope="module")
def never_stopped():
    """Return the rates and the weights of an uninterrupted run."""
    whole = Recorder(others_lower_at=13)
    model = train(ROWS[:8], hk.callbacks.LearningRateWarmup(10, scale=5.0), whole, epochs=2)
    return whole.rates, [v.numpy() for v in model.variables]


@pytest.mark.parametrize("stop", after_core([(5, True), (8, False), (12, True), (15, False)], but=[(12, True)]))
def test_a_run_continued_with_new_callbacks_equals_one_never_stopped(stop, never_stopped):
    """Two epochs of 8 steps; the warm-up ends after 10, and at 13 another callback lowers the rate."""
    at, restorer_first = stop
    rates, expected = never_stopped
    first = Recorder(save_at=at, others_lower_at=13)
    train(ROWS[:8], first, hk.callbacks.LearningRateWarmup(10, scale=5.0), hk.callbacks.StepLog(8), epochs=2)
    rest = np.concatenate([ROWS[:8], ROWS[:8]])[at:]
    second = Recorder(others_lower_at=13 - at)
    # A different scale than before: the run keeps its original one.
    callbacks = [hk.callbacks.LearningRateWarmup(10), hk.callbacks.StepLog(8)]
    callbacks.insert(0 if restorer_first else 2, Restorer(first.saved))
    continued = train(rest, *callbacks, second)
    assert first.rates + second.rates == rates
    same_values(continued.variables, expected)


def test_steps_go_on_in_messages_and_lines_after_a_restore(capfd):
    first = Recorder(save_at=6)
    callbacks = [hk.callbacks.StopOnNonFinite(), hk.callbacks.StepLog(8, every=4)]
    train(ROWS, first, *callbacks)
    assert [c.state for c in callbacks] == [{"steps": 6}, {"steps": 6}]
    capfd.readouterr()
    rows = ROWS[6:].copy()
    rows[8] = np.nan
    with pytest.raises(hk.NonFiniteError, match="step 15 on rank 0"):
        train(rows, Restorer(first.saved), hk.callbacks.StopOnNonFinite(), hk.callbacks.StepLog(8, every=4))
    printed = capfd.readouterr().err
    assert [f"step {n}, loss" in printed for n in (4, 7, 8, 12)] == [False, False, True, True]


def test_a_state_from_before_the_training_changes_nothing():
    warmup, recorder = hk.callbacks.LearningRateWarmup(4, scale=3.0), Recorder()
    state = hk.callbacks.LearningRateWarmup(4, scale=3.0).state

    class Late(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            warmup.restore(state)

    train(ROWS[:6], warmup, Late(), recorder)
    assert recorder.rates == pytest.approx([0.02, 0.03, 0.04, 0.05, 0.06, 0.06])


@pytest.mark.full
def test_a_fit_sees_its_own_callbacks_only():
    model = model_of(0.1)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.append(stateful_callbacks(self.model))

        def on_train_end(self, logs=None):
            seen.append(stateful_callbacks(self.model))

    class Fails(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise KeyError("before training")

    def fit(*callbacks):
        model.fit(ROWS[:4, :2], ROWS[:4, 2:], callbacks=list(callbacks), verbose=0)

    log, warmup, stop = hk.callbacks.StepLog(8), hk.callbacks.LearningRateWarmup(2), hk.callbacks.StopOnNonFinite()
    with pytest.raises(KeyError):
        fit(hk.callbacks.StepLog(8), log, Fails())
    fit(Look(), warmup, log)
    assert seen == [[warmup, log]] * 2  # in this fit's order, not the previous one's
    fit(stop, Look(), warmup)
    assert seen[2:] == [[stop, warmup]] * 2
    fit(Look())
    assert seen[4:] == [[], []]
    other = model_of(0.1)
    assert stateful_callbacks(other) == []


@pytest.mark.full
def test_nobody_is_kept_alive_for_having_a_state():
    from hvdkit.keras import step_callbacks

    gc.collect()
    before = len(step_callbacks._stateful)
    for _ in range(3):
        train(ROWS[:2], hk.callbacks.StepLog(8))
    gc.collect()
    assert len(step_callbacks._stateful) <= before + 1  # Keras may keep a reference to the last one


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_warmup_schedule_and_callback_agree(scale):
    schedule = hk.schedules.Warmup(0.1, scale=scale, steps=4)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate))

    warmup = hk.callbacks.LearningRateWarmup(4, scale=scale)
    model.fit(np.zeros((7, 1)), np.zeros((7, 1)), batch_size=1, callbacks=[warmup, Watch()], verbose=0)
    np.testing.assert_allclose(seen, [float(schedule(step)) for step in range(7)], rtol=1e-6)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))
    assert float(again(2)) == float(schedule(2))


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, keras.optimizers.LossScaleOptimizer])
def test_warmup_of_a_schedule_is_refused_with_the_remedy(wrap):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model.compile(wrap(keras.optimizers.SGD(decay)), "mse")
    with pytest.raises(TypeError, match=r"learning rate: got a schedule, .* hk\.schedules\.Warmup"):
        hk.fit(model, np.zeros((7, 1)), np.zeros((7, 1)), callbacks=[hk.callbacks.LearningRateWarmup(4)], verbose=0)
