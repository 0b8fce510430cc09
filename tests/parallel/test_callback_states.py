"""A run that is killed and continued makes the decisions of one that was not: the states of callbacks are saved."""

from __future__ import annotations

import json
import os
import signal

import keras
import numpy as np
import pytest
from helpers.as_one import same_values
from helpers.tiers import at_night

import hvdkit as hk

pytestmark = pytest.mark.usefixtures("removed")
EPOCHS = 12


class Killed(Exception):
    """Ends a run at once, on every rank."""


class KillAtEpoch(keras.callbacks.Callback):
    """Ends the run when an epoch begins."""

    def __init__(self, epoch: int | None):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Killed


class Decay(keras.callbacks.Callback):
    """A user's callback: halves the rate after every third epoch without a better loss."""

    def __init__(self):
        super().__init__()
        self.losses: list[float] = []

    def get_state(self):
        return {"losses": self.losses}

    def set_state(self, state):
        self.losses = list(state["losses"])

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["val_loss"])
        if len(self.losses) % 3 == 0 and self.losses[-1] >= min(self.losses):
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5


def data():
    rng = np.random.default_rng(39)
    x = rng.normal(size=(60, 4)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    y[45:] = 1 - y[45:]  # validation gets worse as training gets better
    return (x[:45], y[:45]), (x[45:], y[45:])


def build(sharded):
    keras.utils.set_random_seed(39)
    layers = keras.layers
    if sharded:
        inputs = keras.Input((4,))
        bins = layers.Discretization(bin_boundaries=[-1.0, -0.5, 0.0, 0.5, 1.0])(inputs)
        table = hk.layers.ShardedEmbedding(6, 8)(bins)
        outputs = layers.Dense(1, activation="sigmoid")(layers.Flatten()(table))
        return keras.Model(inputs, outputs)
    first = layers.Dense(8, activation="tanh")
    last = layers.Dense(1, activation="sigmoid")
    return keras.Sequential([keras.Input((4,)), first, layers.BatchNormalization(), layers.Dropout(0.1), last])


def train(folder, run, *, kill_at=None, sharded=False, patience=4, epochs=EPOCHS, **options):
    """Run the user's script once; return its History, model, and what it has written on the chief."""
    model = build(sharded)
    optimizer = keras.optimizers.Adam(0.05)
    model.compile(hk.DistributedOptimizer(optimizer) if sharded else optimizer, "binary_crossentropy")
    (x, y), validation = data()
    best = folder / f"{run}.weights.h5"
    callbacks = [
        keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True, save_weights_only=True),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=2, min_delta=1e-3),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=patience, min_delta=1e-3, restore_best_weights=True),
        keras.callbacks.CSVLogger(folder / f"{run}.csv"),
        Decay(),
        KillAtEpoch(kill_at),
    ]
    if sharded:
        del callbacks[0]  # Keras's files have no place for sharded tables
    given = {"logdir": folder / run, "batch_size": 16, "epochs": epochs, "validation_data": validation}
    history = hk.fit(model, x, y, verbose=0, **{**given, "callbacks": callbacks, **options})
    return history, model


def outcome(model, folder, run):
    weights = [np.array(weight) for weight in [*model.weights, *model.optimizer.variables]]
    best = folder / f"{run}.weights.h5"
    saved = None
    if hk.is_chief():
        saved = (folder / f"{run}.csv").read_text(), best.exists() and (best.stat().st_mtime_ns, best.read_bytes())
    return weights, saved


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", at_night([False, True], but=[False]), ids=["replicated", "sharded"])
def test_a_run_that_is_killed_and_continued_decides_like_one_that_was_not(shared_path, sharded):
    whole, model = train(shared_path, "whole", sharded=sharded)
    assert 4 < len(whole.epoch) < EPOCHS, whole.history  # EarlyStopping has ended it
    expected = outcome(model, shared_path, "whole")
    for kill_at in (1, 2, 4):
        with pytest.raises(Killed):
            train(shared_path, "parts", sharded=sharded, kill_at=kill_at)
    history, model = train(shared_path, "parts", sharded=sharded)
    begin = history.epoch[0]
    assert history.epoch == whole.epoch[begin:]
    assert history.history == {name: values[begin:] for name, values in whole.history.items()}
    weights, saved = outcome(model, shared_path, "parts")
    same_values(weights, expected[0])
    if hk.is_chief():
        assert saved[0] == expected[1][0]  # the rows of the CSV file

    # The same command again: the run is complete, and nothing is overwritten.
    history, model = train(shared_path, "parts", sharded=sharded)
    assert history.epoch == []
    again, kept = outcome(model, shared_path, "parts")
    same_values(again, weights)
    assert kept == saved


def test_a_run_that_is_complete_says_what_ended_it(shared_path, caplog):
    _, model = train(shared_path, "run")
    _, again = train(shared_path, "run")
    steps = int(model.optimizer.iterations)
    if hk.is_chief():
        assert f"nothing to train: the run was stopped by EarlyStopping at step {steps} (" in caplog.text
    history, _ = train(shared_path, "run", patience=8)  # more patience: it goes on
    assert history.epoch[0] == steps // 3 and len(history.epoch) > 1
    same_values(again.get_weights(), model.get_weights())


def test_a_signal_in_the_last_step_of_an_epoch_keeps_its_decisions(shared_path):
    """The run is saved in that step, and again after its validation."""
    whole, _ = train(shared_path, "whole")

    class StopAtStep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hk.is_chief() and int(self.model.optimizer.iterations) == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    keep = hk.callbacks.SupervisorCallback(shared_path / "parts", save_steps=1)
    stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=4, min_delta=1e-3)
    with pytest.raises(SystemExit, match="75"):
        train(shared_path, "parts", logdir=None, callbacks=[keep, stopping, StopAtStep()])
    manifest = json.loads((hk.checkpoint.latest(shared_path / "parts") / "manifest.json").read_text())
    saved = manifest["values"]["state/callbacks"]["EarlyStopping"]
    epochs = manifest["values"]["position"]["global_step"] // 3
    assert saved["wait"] == stopping.wait and saved["best"] == min(whole.history["val_loss"][:epochs])


def test_in_plain_fit_the_callbacks_to_save_are_passed(shared_path):
    def plain(run, epochs):
        keras.utils.set_random_seed(39)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile(hk.DistributedOptimizer(keras.optimizers.Adam(0.05)), "binary_crossentropy")
        (x, y), validation = data()
        rows = slice(hk.rank(), 44, hk.size()) if hk.size() < 3 else slice(hk.rank() * 14, hk.rank() * 14 + 14)
        stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=4, restore_best_weights=True)
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=2)
        keep = hk.callbacks.SupervisorCallback(shared_path / run, callbacks=[stopping, plateau], save_epochs=True)
        callbacks = [hk.callbacks.MetricAverage(), stopping, plateau, keep]
        history = model.fit(
            x[rows], y[rows], batch_size=7, epochs=epochs, validation_data=validation, callbacks=callbacks, verbose=0
        )
        return history, model

    whole, expected = plain("whole", EPOCHS)
    plain("parts", 3)
    history, model = plain("parts", EPOCHS)
    assert history.epoch[0] == 3 and history.epoch == whole.epoch[3:]
    same_values(model.get_weights(), expected.get_weights())
    again, model = plain("parts", EPOCHS)
    assert not again.epoch
    same_values(model.get_weights(), expected.get_weights())


def test_a_run_may_get_and_lose_callbacks(shared_path):
    (x, y), validation = data()
    for callbacks in ([], [keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)], []):
        model = build(sharded=False)
        model.compile("adam", "binary_crossentropy")
        epochs = 2 if not (shared_path / "run").exists() else 4 if callbacks else 6
        history = hk.fit(
            model, x, y, epochs=epochs, validation_data=validation, logdir=shared_path / "run", callbacks=callbacks
        )
        assert history.epoch[-1] == epochs - 1


def test_a_state_that_is_not_json_is_an_error_that_names_the_callback(shared_path):
    class Model(keras.callbacks.Callback):
        def get_state(self):
            return {"model": self.model}

        def set_state(self, state):
            raise AssertionError(state)

    (x, y), _ = data()
    model = build(sharded=False)
    model.compile("adam", "binary_crossentropy")
    with pytest.raises(Exception, match=r"Model.get_state\(\).*JSON"):
        hk.fit(model, x, y, epochs=2, logdir=shared_path, callbacks=[Model()])
    with pytest.raises(TypeError, match="expected Keras callbacks"):
        hk.callbacks.SupervisorCallback(shared_path, callbacks=[keras.callbacks.EarlyStopping])


@pytest.mark.parametrize("kind", ["ModelCheckpoint", "of the chief", "of the chief, best"])
def test_callbacks_of_the_chief_only_have_a_state(shared_path, kind):
    (x, y), validation = data()

    def run(epochs):
        model = build(sharded=False)
        model.compile("adam", "binary_crossentropy")
        if kind == "ModelCheckpoint":
            callback = keras.callbacks.ModelCheckpoint(shared_path / "best.keras", save_best_only=True)
        else:
            stops = keras.callbacks.EarlyStopping(patience=9, restore_best_weights=kind.endswith("best"))
            callback = hk.callbacks.on_chief(stops)
        logdir = shared_path / "run"
        history = hk.fit(
            model, x, y, epochs=epochs, validation_data=validation, verbose=0, logdir=logdir, callbacks=[callback]
        )
        return history, callback

    first, _ = run(3)
    second, callback = run(5)
    assert second.epoch == [3, 4]
    if hk.is_chief():
        assert callback.best == min([*first.history["val_loss"], *second.history["val_loss"]])


class Net(keras.Model):
    """A model without an Input, as users write it."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.last = keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs):
        return self.last(self.hidden(inputs))


def test_a_subclassed_model_is_built_before_its_run_is_restored(shared_path):
    (x, y), _ = data()

    def run(epochs, **options):
        keras.utils.set_random_seed(1)
        model = Net()
        model.compile("adam", "binary_crossentropy")
        history = hk.fit(model, x, y, batch_size=15, epochs=epochs, shuffle=False, verbose=0, **options)
        return history.history["loss"], model.get_weights()

    losses, weights = run(4)
    begin, _ = run(2, logdir=shared_path / "run")
    end, saved = run(4, logdir=shared_path / "run")
    np.testing.assert_allclose([*begin, *end], losses, rtol=1e-6)
    for got, expected in zip(saved, weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_complete_run_that_was_interrupted_repeats_no_batches(shared_path, caplog):
    (x, y), _ = data()

    def run(epochs, kill_at=None):
        model = build(sharded=False)
        model.compile("adam", "binary_crossentropy")
        keep = hk.callbacks.SupervisorCallback(shared_path, save_steps=1, until=None)

        class Kill(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if int(self.model.optimizer.iterations) == kill_at:
                    raise Killed

        return hk.fit(model, x, y, batch_size=15, epochs=epochs, verbose=0, callbacks=[keep, Kill()])

    with pytest.raises(Killed):
        run(2, kill_at=2)
    run(2)
    caplog.clear()
    assert not run(2).epoch
    assert "whose batches are repeated" not in caplog.text
    if hk.is_chief():
        assert "nothing to train: the run is already at step" in caplog.text and "History is empty" in caplog.text
