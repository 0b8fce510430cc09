"""The last line of a run, and the same facts as JSON."""

from __future__ import annotations

import json
import re

import keras
import numpy as np
import pytest

import hvdkit as hk


@pytest.fixture
def fit(capfd):
    """Return a function that trains a new model and returns what ``hk.fit`` has written to standard error."""
    hk.init()
    x = np.zeros((100, 2), "float32")

    def fit(*, x=x, y=x[:, :1], epochs=3, verbose=2, **options):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        hk.fit(model, x, y, epochs=epochs, verbose=verbose, **options)
        return capfd.readouterr().err

    return fit


class StopAfterTwo(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


def test_a_fit_says_what_it_has_trained(fit):
    assert re.search(r"trained 3 epochs, 12 steps in [\d.]+ s \([\d,.]+ examples/s\)\n", fit())
    assert re.search(r"trained 1 epoch, 1 step in ", fit(epochs=1, batch_size=100))


def test_a_fit_that_is_silent_says_nothing(fit):
    assert "trained" not in fit(verbose=0)


def test_a_fit_that_stops_early_says_where(fit):
    assert "stopped after epoch 2 of 5" in fit(epochs=5, callbacks=[StopAfterTwo()])


@pytest.mark.full
def test_batches_of_unknown_size_are_counted_in_steps(fit):
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((np.zeros((100, 2)), np.zeros((100, 1)))).batch(32)
    assert re.search(r"trained 3 epochs, 12 steps in [\d.]+ s \([\d.]+ steps/s\)", fit(x=dataset, y=None))
    declared = dataset.unbatch().batch(20, drop_remainder=True)
    assert re.search(r"trained 3 epochs, 15 steps in [\d.]+ s \([\d,.]+ examples/s\)", fit(x=declared, y=None))


def test_a_run_names_its_checkpoint_and_folder_once(fit, tmp_path):
    logdir = tmp_path / "run"
    text = fit(logdir=logdir, verbose=0)
    newest = hk.checkpoint.latest(logdir)
    assert text.count("trained ") == 1
    assert f", to step 12; newest checkpoint: {newest}; curves: tensorboard --logdir {logdir}" in text
    assert f"nothing to train: the run is already at step 12 ({newest}); pass more epochs" in fit(logdir=logdir)


class Breaks(keras.callbacks.Callback):
    """Fails in a step of a run, after the callbacks before it."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        self.step -= 1
        if self.step == 0:
            raise KeyError("a disk is gone")


@pytest.mark.full
def test_a_run_that_continues_within_an_epoch_counts_what_it_has_trained(fit, tmp_path, monkeypatch):
    def run(*others, epochs=5, **options):
        saver = hk.callbacks.SupervisorCallback(tmp_path / "run", save_steps=3, **options)
        return fit(epochs=epochs, callbacks=[saver, *others])  # of 4 steps

    with pytest.raises(KeyError):
        run(Breaks(8))
    assert "trained the rest of epoch 2 and 3 epochs, 14 steps in " in run()
    assert "nothing to train" in run()
    monkeypatch.setenv("HVDKIT_SUMMARY", str(tmp_path / "summary.json"))
    text = run(epochs=7, until=22)
    assert re.search(r"trained part of epoch 6, 2 steps in .*, to step 22; stopped in epoch 6 of 7; newest", text), text
    assert "trained the rest of epoch 6, 2 steps in " in run(epochs=6)
    text = run(epochs=9, until=33)
    assert "trained 2 epochs and part of epoch 9, 9 steps in " in text and "stopped in epoch 9 of 9" in text
    facts = json.loads((tmp_path / "summary.json").read_text())
    assert [facts[name] for name in ("epochs", "continued_epoch", "unfinished_epoch", "steps")] == [2, None, 9, 9]
    text = run(epochs=11, until=42)
    assert "trained the rest of epoch 9, 1 epoch and part of epoch 11, 9 steps in " in text


@pytest.mark.full
def test_an_epoch_that_is_repeated_is_a_whole_one(fit, tmp_path):
    """A dataset's position is not saved: the batches of its epoch are trained on again."""
    import tensorflow as tf

    rows = np.zeros((100, 2), "float32")
    dataset = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(25)
    with pytest.raises(KeyError):
        fit(x=dataset, y=None, callbacks=[hk.callbacks.SupervisorCallback(tmp_path, save_steps=3), Breaks(8)])
    assert "trained 2 epochs, 8 steps in " in fit(x=dataset, y=None, logdir=tmp_path)


def test_a_file_gets_the_same_facts(fit, tmp_path, monkeypatch):
    file = tmp_path / "summary.json"
    monkeypatch.setenv("HVDKIT_SUMMARY", str(file))
    fit(verbose=0)
    facts = json.loads(file.read_text())
    assert facts.pop("seconds") > 0
    assert facts == {
        "steps": 12,
        "epochs": 3,
        "continued_epoch": None,
        "unfinished_epoch": None,
        "examples_per_step": 25.0,
        "stopped": "",
        "step": None,
        "checkpoint": None,
        "logdir": None,
        "ranks": 1,
    }
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.full
def test_a_file_that_cannot_be_written_is_a_warning(fit, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDKIT_SUMMARY", str(tmp_path / "missing" / "summary.json"))
    text = fit()
    assert "HVDKIT_SUMMARY: the summary was not written: " in text and "trained 3 epochs" in text


def test_a_loop_counts_examples_if_it_reads_global_batches(tmp_path, capfd):
    hk.init()
    x = np.zeros((100, 2), "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = hk.data.GlobalBatches((x, x[:, :1]), 32, epochs=1)
    with hk.Supervisor(tmp_path, model=model, data=batches) as supervisor:
        for rows, labels in supervisor.batches():
            supervisor.step(loss=model.train_on_batch(rows, labels))
    assert re.search(r"trained 4 steps in [\d.]+ s \([\d,.]+ examples/s\), to step 4", capfd.readouterr().err)
