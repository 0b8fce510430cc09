"""Callbacks, custom training steps and other data under hk.fit."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import compare, line, plain, ported, raises_on_several, same_logs, same_weights
from helpers.tiers import at_night

import hvdkit as hk
from hvdkit.cluster.logs import warn_once

layers = keras.layers


def dense(optimizer="sgd", **options):
    def build():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile(optimizer, "mse", **options)
        return model

    return build


class Raises(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if hk.rank() == hk.size() - 1:
            raise OSError("disk full")


class StopsAlone(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = hk.rank() == hk.size() - 1


@pytest.mark.core
def test_one_rank_that_raises_or_stops_alone_is_an_error_on_all(rng):
    x, y = line(rng)
    last = hk.rank() == hk.size() - 1
    words = "disk full" if last else f"rank {hk.size() - 1} raised OSError: disk full"
    with pytest.raises(OSError if last else hk.CollectiveMismatchError, match=words):
        hk.fit(dense()(), x, y, epochs=3, verbose=0, callbacks=[Raises()])
    stops = rf"got .*stop_training.: True.* on rank {hk.size() - 1}"
    with pytest.raises(hk.CollectiveMismatchError, match=stops):
        hk.fit(dense()(), x, y, epochs=3, verbose=0, callbacks=[StopsAlone()])


class Writes(keras.callbacks.Callback):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_batch_end(self, batch, logs=None):
        with self.path.open("a") as file:
            file.write(f"{logs['loss']}\n")


@pytest.mark.parametrize("plainly", [False, True], ids=["hk.fit", "fit"])
def test_callbacks_of_the_chief_run_there_alone(plainly, rng, shared_path):
    x, y = line(rng)
    model = dense(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)))()
    callbacks = [hk.callbacks.on_chief(Writes(shared_path / "log")), keras.callbacks.TerminateOnNaN()]
    if plainly:
        first, last = hk.rank() * 8, hk.rank() * 8 + 8
        x, y = (np.resize(each, (8 * hk.size(), each.shape[1]))[first:last] for each in (x, y))
    fit = model.fit if plainly else partial(hk.fit, model)
    history = fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=callbacks).history["loss"]
    hk.barrier()
    losses = np.loadtxt(shared_path / "log")
    assert len(losses) == (2 if plainly else 6)
    if plainly or hk.is_chief():
        expected = hk.broadcast_object(history) if plainly else history
        np.testing.assert_allclose(losses[-1], expected[-1], rtol=1e-4)
    with pytest.raises(TypeError, match=r"callback: got .*Writes"):
        hk.callbacks.on_chief(Writes)


def test_lists_of_callbacks_that_differ_are_an_error_on_all(rng):
    x, y = line(rng)
    last = hk.size() - 1
    stops = [keras.callbacks.EarlyStopping("loss")] if hk.rank() < last else []
    words = rf"callbacks: got \[\] on rank {last}, expected \['EarlyStopping'\]"
    with raises_on_several(hk.CollectiveMismatchError, words):
        hk.fit(dense()(), x, y, verbose=0, callbacks=stops)
    with raises_on_several(hk.CollectiveMismatchError, rf"callbacks: got \[\] on rank {last}"):
        hk.predict(dense()(), x, verbose=0, callbacks=stops)


def test_writers_may_be_on_the_chief_alone(rng, shared_path):
    x, y = line(rng)
    path = shared_path / "{epoch}-{batch}.keras"
    kinds = keras.callbacks
    writes = [kinds.ModelCheckpoint(path, save_freq=2), kinds.CSVLogger(shared_path / "a.csv"), kinds.History()]
    hk.fit(dense()(), x, y, batch_size=11, verbose=0, callbacks=writes if hk.is_chief() else [])
    hk.barrier()
    assert len([*shared_path.glob("*.keras")]) == 1
    assert (shared_path / "a.csv").exists()


@pytest.mark.parametrize(("first", "other", "key"), [("sgd", "adam", "class"), (0.1, 0.2, "learning_rate")])
def test_optimizers_that_differ_are_an_error_on_all(first, other, key, rng):
    x, y = line(rng)
    each = [keras.optimizers.SGD(a) if isinstance(a, float) else a for a in (first, other)]
    last = hk.size() - 1
    model = dense(each[hk.rank() == last > 0])()
    with raises_on_several(hk.CollectiveMismatchError, f"optimizer: got {key}=.* on rank {last}"):
        hk.fit(model, x, y, verbose=0)


def test_a_chief_that_restored_alone_has_the_rate_for_all(rng):
    x, y = line(rng)
    model = dense(keras.optimizers.SGD(0.1))()
    if hk.is_chief():
        model.optimizer.iterations.assign(7)
        model.optimizer.learning_rate = 0.01
    hk.fit(model, x, y, verbose=0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)
    assert int(model.optimizer.iterations) == 8


def test_without_a_terminal_the_chief_prints_a_line_per_epoch(rng, capfd):
    x, y = line(rng)
    model = dense()()
    hk.fit(model, x, y, batch_size=8, epochs=2)
    hk.evaluate(model, x, y, batch_size=8)
    hk.predict(model, x, batch_size=8)
    out = capfd.readouterr().out
    assert "\b" not in out
    assert out.count("3/3") == (4 if hk.is_chief() else 0)


def test_an_optimizer_that_the_model_does_not_hold_is_an_error(rng):
    x, y = line(rng)
    hidden = keras.optimizers.SGD(0.1)

    class Hides(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            hidden.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    model = Hides([keras.Input((3,)), layers.Dense(1)])
    model.compile()
    with raises_on_several(hk.CollectiveMismatchError, r"after the first update: .*attribute of the model"):
        hk.fit(model, x, y, verbose=0)


@pytest.mark.ranks(1, 2)
def test_callbacks_of_batches_get_what_the_step_returns(rng):
    """As in Keras, also if the step returns a loss under a metric's name, but updates no metric."""
    x, y = line(rng)

    class Untracked(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(logs["loss"]))

    found = []
    for fit in (keras.Model.fit, hk.fit):
        model = Untracked([keras.Input((3,)), layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.01))
        seen: list[float] = []
        fit(model, x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Reads()])
        found.append(seen)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


class OwnMetric(keras.metrics.Metric):
    """A metric with one variable, which ``update`` changes."""

    def __init__(self, update, first=0.0):
        super().__init__(name="own")
        self.value = self.add_variable((), "zeros", name="value")
        self.update, self.first = update, first
        self.reset_state()

    def reset_state(self):
        self.value.assign(self.first)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(self.update(self.value, y_true - y_pred))

    def result(self):
        return self.value * 1.0


class Ended(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pytest.fail("an epoch has ended")


@pytest.mark.parametrize(
    ("update", "options"),
    [
        (lambda s, e: keras.ops.maximum(s, keras.ops.max(e)), {}),
        (lambda s, e: keras.ops.mean(e), {"run_eagerly": True}),
        (lambda s, e: 0.9 * s + 0.1 * keras.ops.mean(e), {}),
    ],
    ids=["maximum", "last", "decaying"],
)
def test_metrics_whose_state_is_no_sum_are_refused(update, options, rng):
    x, y = line(rng)
    with pytest.raises(ValueError, match="metrics: got 'own'"):
        hk.fit(dense(metrics=[OwnMetric(update)], **options)(), x, y, epochs=2, verbose=0, callbacks=[Ended()])
    with pytest.raises(ValueError, match="metrics: got 'own'"):
        hk.evaluate(dense(metrics=[OwnMetric(update)], **options)(), x, y, verbose=0)


def test_metrics_whose_state_does_not_begin_with_0_are_refused(rng):
    x, y = line(rng)
    metric = OwnMetric(lambda s, e: keras.ops.minimum(s, keras.ops.min(e)), first=1e9)
    with raises_on_several(ValueError, "metrics: got 'own'"):
        hk.fit(dense(metrics=[metric])(), x, y, epochs=2, verbose=0, callbacks=[Ended()] if hk.size() > 1 else [])


@pytest.mark.parametrize("options", at_night([{}, {"run_eagerly": True}], but=[{}]), ids=str)
def test_own_metrics_that_are_sums_keep_their_values(options, rng):
    def build():
        return dense(metrics=[OwnMetric(lambda s, e: s + keras.ops.sum(e))], **options)()

    x, y = line(rng)
    compare(build, x, y, batch_size=8, epochs=2, validation_split=0.2)


def unknown_length(x, y):
    rows = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: True).batch(8)
    assert rows.cardinality() == tf.data.UNKNOWN_CARDINALITY
    return rows


@pytest.mark.parametrize("known", at_night([True, False], but=[True]))
def test_a_run_in_a_folder_goes_on_after_its_last_epoch(known, rng, shared_path):
    x, y = line(rng)
    data, options = ((x, y), {"batch_size": 8, "shuffle": False}) if known else ((unknown_length(x, y),), {})
    one, expected = plain(dense("adam"), *data, epochs=3, **options)
    options["logdir"] = shared_path / "run"
    ported(dense("adam"), *data, epochs=1, **options)
    for epochs_left in (2, 0):
        many, found = ported(dense("adam"), *data, epochs=3, **options)
        same_logs(found, {"loss": expected["loss"][1:]} if epochs_left else {})
        same_weights(many, one)


def test_a_stop_within_an_epoch_of_unknown_length_repeats_the_epoch(rng, shared_path):
    rows = unknown_length(*line(rng))

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = self.params["epochs"] == 2 and batch == 1

    class Epochs(keras.callbacks.Callback):
        begun: ClassVar = []

        def on_epoch_begin(self, epoch, logs=None):
            self.begun.append(epoch)

    folder, epochs = shared_path / "run", Epochs()
    ported(dense("adam"), rows, epochs=1, logdir=folder)
    ported(dense("adam"), rows, epochs=2, logdir=folder, callbacks=[Stops(), epochs])
    ported(dense("adam"), rows, epochs=3, logdir=folder, callbacks=[epochs])
    assert epochs.begun == [1, 1, 2]


def test_dropout_differs_between_ranks_and_is_reproducible(rng):
    def build():
        model = keras.Sequential([keras.Input((64,)), layers.Dropout(0.5, seed=3), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    x = np.ones((4 * hk.size(), 64), "float32")
    weights = [ported(build, x, x[:, :1], batch_size=2 * hk.size(), shuffle=False)[0] for _ in range(2)]
    np.testing.assert_array_equal(weights[0].get_weights()[0], weights[1].get_weights()[0])
    states = hk.allgather_object(next(int(v[0]) for v in weights[0].variables if "seed" in v.name))
    assert len(set(states)) == hk.size()


class Draws(keras.Model):
    """A model that logs random numbers drawn in its step."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.drawn = []

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        drawn = keras.random.uniform(()), tf.random.uniform(())
        for variable, value in zip(self.drawn, drawn, strict=True):
            variable.assign(value)
        return super().train_step(data)


@pytest.mark.nightly(3)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("options", at_night([{}, {"run_eagerly": True}], but=[{}]), ids=str)
def test_global_random_numbers_differ_between_ranks_and_are_reproducible(options, rng):
    x, y = line(rng)

    def draw():
        keras.utils.clear_session()  # before Keras 3.13, seeds apply to generators that do not exist yet
        keras.utils.set_random_seed(3)
        model = Draws()
        model.drawn = [tf.Variable(0.0), tf.Variable(0.0)]
        hk.register_local_variables(model.drawn)
        model.compile("sgd", "mse", jit_compile=False, **options)
        hk.fit(model, x, y, verbose=0)
        after = float(keras.random.uniform(()))
        assert len(set(hk.allgather_object(after))) == 1
        hk.fit(model, x, y, verbose=0)
        return [float(v) for v in model.drawn]

    drawn = draw()
    for numbers in zip(*hk.allgather_object(drawn), strict=True):
        assert len(set(numbers)) == hk.size()
    assert draw() == drawn


def test_rows_that_repeat_are_warned_about_once(rng, capfd):
    def build(optimizer):
        model = keras.Sequential([keras.Input((2,), dtype="int32"), layers.Embedding(4, 3), layers.Flatten()])
        model.compile(optimizer, "mse")
        return model

    warn_once.cache_clear()
    x, y = rng.integers(4, size=(8, 2)), np.zeros((8, 6), "float32")
    said = []
    for optimizer in ("sgd", "adam", "adam"):
        hk.fit(build(optimizer), x, y, batch_size=8, verbose=0)
        said.append(capfd.readouterr().err.count("one by one"))
    assert said == [0, int(hk.is_chief()), 0]


def test_local_batch_normalization_is_warned_about_once_and_only_in_training(rng, capfd):
    x, y = line(rng, 8)
    model = keras.Sequential([keras.Input(x.shape[1:]), layers.BatchNormalization(), layers.Dense(1)])
    model.compile("sgd", "mse")
    warn_once.cache_clear()
    said = []
    for train in (False, True, True):
        if train:
            hk.fit(model, x, y, batch_size=8, verbose=0)
        else:
            hk.evaluate(model, x, y, batch_size=8, verbose=0)
            hk.predict(model, x, batch_size=8, verbose=0)
        said.append(capfd.readouterr().err.count("normalizes by each rank's rows"))
    assert said == [0, int(hk.is_chief() and hk.size() > 1), 0]


@pytest.mark.nightly
def test_a_run_with_a_logdir_is_saved_at_the_end_of_an_epoch(rng, shared_path):
    x, y = line(rng, 160)

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == 1 and hk.checkpoint.latest(shared_path / "run") is None:
                time.sleep(0.25)  # a save is complete once ranks agree on it, after a step

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyError("no space left")

    def fit(**options):
        keras.utils.set_random_seed(1)
        model = dense("adam")()
        return model, hk.fit(model, x, y, batch_size=4, epochs=3, verbose=0, **options).history["loss"]

    with pytest.raises(KeyError, match="no space left"):
        fit(logdir=shared_path / "run", callbacks=[Fails()])
    assert hk.checkpoint.latest(shared_path / "run").name == "step-000000040"
    model, losses = fit(logdir=shared_path / "run")
    assert len(losses) == 2
    expected, all_losses = fit()
    np.testing.assert_array_equal(losses, all_losses[1:])
    same_weights(model, expected)


@pytest.mark.ranks(2, 3)
def test_the_chief_says_what_all_ranks_have_trained(rng, capfd, shared_path, monkeypatch):
    """Steps and examples are those of the job: 22 rows in global batches of 7, 7, 7 and 1."""
    file = shared_path / "summary.json"
    monkeypatch.setenv("HVDKIT_SUMMARY", str(file))
    x, y = line(rng)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    hk.fit(model, x, y, batch_size=7, epochs=2, verbose=2)
    assert capfd.readouterr().err.count("trained 2 epochs, 8 steps in ") == hk.is_chief()
    hk.barrier()
    facts = json.loads(file.read_text())
    assert (facts["examples_per_step"], facts["ranks"]) == (5.5, hk.size())
