"""``fit`` under SupervisorCallback: interrupted in an epoch and continued, it equals an uninterrupted ``fit``."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values
from helpers.tiers import at_night

import hvdkit as hk
from hvdkit.keras.supervised_fit import is_supervised

X = np.random.default_rng(3).normal(size=(96, 6)).astype(np.float32)
Y = (X @ np.arange(6, dtype=np.float32))[:, None]
EPOCHS, STEPS = 3, 6

pytestmark = pytest.mark.usefixtures("removed")


class Interrupt(keras.callbacks.Callback):
    """Request a stop after some steps of this run, as a user or a cluster would."""

    def __init__(self, keep, after: int | None, number: signal.Signals | None = None):
        super().__init__()
        self.keep, self.left, self.number = keep, after, number
        self.epochs: list[int] = []

    def on_train_batch_end(self, batch, logs=None):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                if self.number is None:
                    self.keep.supervisor.request_stop()
                else:
                    os.kill(os.getpid(), self.number)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


def fit(logdir, after=None, *, steps_per_execution=1, number=None, epochs=EPOCHS, ema=False, **options):
    """Fit to the end or to a stop; return this rank's state, the callback, and the epochs that ended."""
    keras.utils.set_random_seed(hk.rank())
    layers = [
        keras.layers.Dense(5),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.4),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(0.002, use_ema=ema), accumulate_steps=4)
    # Tracing costs more than these few steps; several steps per execution must be traced.
    how = {"run_eagerly": True} if steps_per_execution == 1 else {"steps_per_execution": steps_per_execution}
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False, **how)
    batches = hk.data.GlobalBatches((X, Y), 16, shuffle_seed=1)
    keep = hk.callbacks.SupervisorCallback(
        logdir, data=batches, **{"save_model_secs": None, "save_steps": 1, "summary_steps": 2, **options}
    )
    interrupt = Interrupt(keep, after, number)
    warmup = hk.callbacks.LearningRateWarmup(steps=10, scale=4.0)
    callbacks = [keep, hk.callbacks.MetricAverage(), warmup, interrupt]
    model.fit(batches.as_keras(), epochs=epochs, validation_data=(X, Y), callbacks=callbacks, verbose=0, shuffle=False)
    bits = [tf.convert_to_tensor(v).numpy().tobytes() for v in [*model.variables, *model.optimizer.variables]]
    return bits, keep.supervisor, interrupt.epochs


@pytest.fixture(scope="module")
def whole():
    """Yield the folder and the state of an uninterrupted fit."""
    folder = Path(hk.broadcast_object(tempfile.mkdtemp() if hk.is_chief() else ""))
    bits, session, epochs = fit(folder)
    assert session.global_step == EPOCHS * STEPS
    assert epochs == [0, 1, 2]
    yield folder, bits
    hk.barrier()
    if hk.is_chief():
        shutil.rmtree(folder)


@pytest.fixture
def through(whole):
    return whole[1]


@pytest.fixture(scope="module")
def parts():
    """Yield the folder of a fit stopped three times, in epochs and at their ends, and its final state and step."""
    folder = Path(hk.broadcast_object(tempfile.mkdtemp() if hk.is_chief() else ""))
    ended = []
    for after in (3, 1, 5, None):
        bits, session, epochs = fit(folder, after)
        ended += epochs
    assert ended[-1] == EPOCHS - 1
    yield folder, bits, session.global_step
    hk.barrier()
    if hk.is_chief():
        shutil.rmtree(folder)


def test_a_fit_stopped_in_epochs_and_at_their_ends_equals_one_that_went_through(parts, through):
    folder, bits, step = parts
    assert step == EPOCHS * STEPS
    assert bits == through
    # A finished fit does nothing when it is started again.
    again, session, epochs = fit(folder)
    assert (again, session.global_step, epochs) == (through, EPOCHS * STEPS, [])


@pytest.mark.nightly
def test_several_steps_per_execution_continue_alike(shared_path):
    whole, _, _ = fit(shared_path / "through", steps_per_execution=2)  # the warm-up advances once per two steps
    for after in (1, None):
        bits, session, _ = fit(shared_path / "parts", after, steps_per_execution=2)
    assert session.global_step == EPOCHS * STEPS
    assert bits == whole


@pytest.mark.nightly
def test_averages_that_keras_swaps_in_at_the_end_of_fit_are_not_taken_for_weights(shared_path):
    whole, _, _ = fit(shared_path / "through", ema=True, save_steps=None)
    fit(shared_path / "parts", ema=True, save_steps=None, epochs=1)
    bits, session, _ = fit(shared_path / "parts", ema=True, save_steps=None)
    assert session.global_step == EPOCHS * STEPS
    assert bits == whole


def scaled_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(1 / 96), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(averaging(0.05), initial_scale=4.0), "mse")
    return model


def model_with_a_table():
    table = hk.layers.Table("t", 96, 2, optimizer=averaging(0.5))
    inputs = keras.Input((2,), dtype="int64")
    rows = hk.layers.ShardedEmbeddingCollection([table], {"t": "row"})({"t": inputs})["t"]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def averaging(rate):
    return keras.optimizers.SGD(rate, use_ema=True, ema_momentum=0.9)


@pytest.mark.parametrize("build", [scaled_model, model_with_a_table])
def test_a_run_continues_from_its_weights_and_not_from_their_averages(build, shared_path):
    ids = np.arange(192).reshape(96, 2) % 96

    def weights(folder, epochs):
        keras.utils.set_random_seed(4)
        model = build()
        keep = hk.callbacks.SupervisorCallback(shared_path / folder)
        hk.fit(model, ids, ids[:, :1] / 96, batch_size=16, epochs=epochs, verbose=0, callbacks=[keep])
        return model.get_weights()

    whole = weights("through", 2)
    weights("parts", 1)
    same_values(weights("parts", 2), whole)


def test_averages_that_are_swapped_in_while_a_run_is_saved_are_refused(shared_path):
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    refused = r"got SwapEMAWeights\(swap_on_epoch=True\), .* continue from averages"
    with pytest.raises(ValueError, match=refused):
        hk.fit(scaled_model(), X[:, :2], Y, logdir=str(shared_path / "run"), callbacks=[swap], verbose=0)
    with pytest.raises(ValueError, match=refused):
        hk.callbacks.SupervisorCallback(shared_path / "run", callbacks=[swap])  # for plain fit


def test_steps_per_execution_that_do_not_divide_the_epoch_are_refused(shared_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="steps_per_execution: got 4, expected a divisor of the epoch's 6 steps"):
        fit(shared_path / "run", steps_per_execution=4)
    # Its session was left open; the next one closes it although nothing references it any more.
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) != before
    with hk.Supervisor(shared_path / "run", variables=[tf.Variable(1.0)]):
        pass
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.nightly
def test_a_signal_in_fit_saves_and_ends_with_the_code_of_its_own(shared_path, through, rank, size):
    with pytest.raises(SystemExit) as end:
        fit(shared_path / "parts", 2 if rank == size - 1 else None, number=signal.SIGTERM)
    assert end.value.code == 75
    hk.barrier()
    assert hk.checkpoint.latest(shared_path / "parts") is not None
    bits, _, _ = fit(shared_path / "parts")
    assert bits == through


class CountEvaluations(keras.callbacks.Callback):
    number = 0

    def on_test_begin(self, logs=None):
        self.number += 1


def stopped_by_a_signal(logdir, after, *, with_hk):
    """Return the step of a fit that ended after a signal, and the numbers of its evaluations and complete epochs."""
    keep = hk.callbacks.SupervisorCallback(logdir, save_steps=1)  # ranks agree at every step
    interrupt, evaluations = Interrupt(keep, after, signal.SIGTERM), CountEvaluations()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    settings = {"batch_size": 16, "epochs": EPOCHS, "validation_data": (X, Y), "verbose": 0}
    settings["callbacks"] = [interrupt, keep, evaluations]  # the agreement at this step sees the signal
    optimizer = keras.optimizers.SGD(0.01)
    model.compile(optimizer if with_hk else hk.DistributedOptimizer(optimizer), "mse", jit_compile=False)
    with pytest.raises(SystemExit) as end:
        if with_hk:
            hk.fit(model, X, Y, **settings)
        else:
            model.fit(X, Y, shuffle=False, **settings)
    assert end.value.code == 75
    return keep.supervisor.global_step, evaluations.number, len(interrupt.epochs)


@pytest.mark.parametrize("with_hk", [False, True])
def test_a_signal_within_an_epoch_ends_fit_without_its_validation(shared_path, with_hk):
    step, evaluations, epochs = stopped_by_a_signal(shared_path / "run", STEPS + 2, with_hk=with_hk)
    assert STEPS + 2 <= step < 2 * STEPS
    assert (evaluations, epochs) == (1, 1)


@pytest.mark.parametrize("with_hk", [False, True])
def test_a_signal_in_the_last_step_of_an_epoch_ends_fit_after_its_validation(shared_path, with_hk):
    step, evaluations, epochs = stopped_by_a_signal(shared_path / "run", 2 * STEPS, with_hk=with_hk)
    assert step == 2 * STEPS
    assert (evaluations, epochs) == (2, 2)


class Fails(keras.callbacks.Callback):
    """Raises in one hook."""

    def __init__(self, hook: str):
        super().__init__()
        setattr(self, hook, self.fail)

    def fail(self, *args, **kwargs):
        raise LookupError("a bug")


class FitsAgain(keras.callbacks.Callback):
    """Calls the model's ``fit`` after an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.history = self.model.fit(X[:8], Y[:8], verbose=0)


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("with_hk", at_night([False, True], but=[True]), ids=["fit", "hk.fit"])
def test_a_fit_after_one_that_raised_starts_at_its_own_epoch(shared_path, with_hk):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.002)), "mse", run_eagerly=True)

    def fit(with_hk, *callbacks, epochs=2):
        options = {"batch_size": 48, "epochs": epochs, "callbacks": callbacks, "verbose": 0}
        if with_hk:
            return hk.fit(model, X, Y, **options).epoch
        return model.fit(X[hk.rank() :: hk.size()], Y[hk.rank() :: hk.size()], **options).epoch

    def supervisor():
        return hk.callbacks.SupervisorCallback(shared_path, save_model_secs=None)

    fit(with_hk, supervisor())
    for next_with_hk, failing in (
        (False, [supervisor(), Fails("on_train_begin")]),
        (True, [supervisor(), Fails("on_train_batch_end")]),
        (False, [Fails("on_epoch_begin"), supervisor()]),
        (True, [Fails("on_train_end"), supervisor()]),
    ):
        with pytest.raises(LookupError, match="a bug"):
            fit(with_hk, *failing, epochs=3)
        assert fit(next_with_hk) == [0, 1]
        assert not is_supervised(model) and "fit" not in vars(model)
    again = FitsAgain()
    assert fit(with_hk, supervisor(), again, epochs=4)[-1] == 3
    assert again.history.epoch == [0]


def test_the_epochs_metrics_are_written_once(parts, whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = []
    for folder in (whole[0], parts[0]):
        events = EventAccumulator(str(folder / "summaries"))
        events.Reload()
        assert [e.step for e in events.Scalars("loss")] == list(range(2, 19, 2))
        curves.append({e.step: e.value for e in events.Scalars("epoch_val_mae")})
    assert all(curves[1][step] == curves[0][step] for step in curves[0])


class Staged(keras.Sequential):
    def train_step(self, data):
        return {**super().train_step(data), "stage": tf.constant("first")}


def test_logs_may_be_arrays_and_text(shared_path):
    """A metric with a value for each class, and a step that returns text: the summaries have the numbers."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rng = np.random.default_rng(3)
    x = rng.normal(size=(24, 2)).astype("f4")
    y = np.eye(3, dtype="f4")[rng.integers(0, 3, 24)]
    model = Staged([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
    metrics = [keras.metrics.F1Score(average=None, name="f1")]
    model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy", metrics=metrics)
    keep = hk.callbacks.SupervisorCallback(shared_path, summary_steps=2)
    history = hk.fit(model, x, y, validation_data=(x, y), batch_size=6, epochs=2, verbose=0, callbacks=[keep]).history
    events = EventAccumulator(str(shared_path / "summaries"))
    events.Reload()
    assert [event.step for event in events.Scalars("f1/2")] == [2, 4, 6, 8]
    for index in range(3):
        for name in ("f1", "val_f1"):
            written = [event.value for event in events.Scalars(f"epoch_{name}/{index}")]
            np.testing.assert_allclose(written, [values[index] for values in history[name]], rtol=1e-6)
    assert not [tag for tag in events.Tags()["scalars"] if "stage" in tag]


def test_a_fit_on_plain_arrays_goes_on_with_its_epoch(shared_path, caplog):
    def plain(after):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=False)
        keep = hk.callbacks.SupervisorCallback(shared_path / "run", save_steps=1)
        interrupt = Interrupt(keep, after)
        model.fit(X, Y, batch_size=16, epochs=2, callbacks=[keep, interrupt], verbose=0, shuffle=False)
        return keep.supervisor.global_step, interrupt.epochs

    stopped, _ = plain(6 + 1)
    step, epochs = plain(None)
    begun = stopped % STEPS
    assert epochs == ([1] if stopped < 2 * STEPS else [])
    assert step == (stopped - begun + (STEPS if stopped < 2 * STEPS else 0)) + begun


def test_the_manifest_keeps_the_callbacks(parts):
    values = json.loads((hk.checkpoint.latest(parts[0]) / "manifest.json").read_text())["values"]
    assert values["state/callbacks"]["LearningRateWarmup"]["steps"] == EPOCHS * STEPS
