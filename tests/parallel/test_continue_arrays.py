"""``hk.fit`` with a ``logdir``, interrupted in epochs: arrays continue at the next batch, datasets repeat the epoch."""

from __future__ import annotations

import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.tiers import at_night

import hvdkit as hk

pytestmark = [pytest.mark.usefixtures("removed"), pytest.mark.ranks(1, 2)]
ROWS, BATCH = 397, 8  # the last of 50 batches is short, and its shares are uneven


class Interrupt(keras.callbacks.Callback):
    """Interrupts the run as a cluster does, after a number of its batches.

    Ranks agree four times per second on stopping: steps of 20 ms end at most about 12 steps after the signal.
    """

    def __init__(self, after):
        super().__init__()
        self.left = after
        self.seconds = 0.02 if after else 0.0

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train(model, *data, after=0, **options):
    """Run the user's script; return the losses of its epochs, or None if it was interrupted."""
    try:
        return hk.fit(model, *data, verbose=0, callbacks=[Interrupt(after)], **options).history["loss"]
    except SystemExit as ended:
        assert ended.code == 75
        return None


@pytest.mark.nightly(1, 3)
@pytest.mark.parametrize(
    "shuffle",
    [
        pytest.param(True, marks=[pytest.mark.core(2), pytest.mark.ranks(1, 2, 3)]),
        *at_night([False, "batch"], but=[]),
    ],
)
def test_a_run_with_a_seed_equals_one_that_was_not_interrupted(shared_path, shuffle):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    y = x.sum(1, keepdims=True)

    def run(name, after=0):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dropout(0.2)])
        model.add(keras.layers.Dense(1))
        model.compile("adam", "mse")
        losses = train(model, x, y, batch_size=BATCH, after=after, epochs=3, shuffle=shuffle, logdir=shared_path / name)
        return losses, [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]

    losses, expected = run("whole")
    assert len(losses) == 3
    for after in (5, 50):  # it ends some steps later: in the first epoch, and in the second
        assert run("parts", after)[0] is None
    continued, weights = run("parts")
    assert len(continued) == 2 and continued[-1] == losses[-1]
    for got, whole in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(got, whole)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*BatchNormalization")
def test_the_state_of_each_rank_continues(shared_path):
    """Moving statistics, and the gradients that have been accumulated when the run is interrupted."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    y = x.sum(1, keepdims=True)

    def run(name, after=0):
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=7), "mse")
        losses = train(model, x, y, batch_size=BATCH, after=after, epochs=3, logdir=shared_path / name)
        return losses, [(v.path, np.asarray(v)) for v in [*model.variables, *model.optimizer.variables]]

    _, expected = run("whole")
    for after in (3, 50):
        assert run("parts", after)[0] is None
    _, found = run("parts")
    for (path, whole), (_, value) in zip(expected, found, strict=True):
        np.testing.assert_array_equal(value, whole, path)


@pytest.fixture
def unseeded():
    """Take back the seed that an earlier test has set in this process."""
    import tensorflow.python.eager.context as context

    before = context.global_seed()
    context.set_global_seed(None)
    yield
    context.set_global_seed(before)


def train_counting(logdir, after, epochs, is_dataset=False):
    """Return whether the run was interrupted, and how often each row has been trained."""
    ids = np.arange(400)[:, None]  # 50 full batches
    model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(400, 1, "zeros")])
    model.compile(keras.optimizers.SGD(float(BATCH)), lambda y, out: -out)  # adds 1 to the row of each id
    data = (ids, np.zeros(400))
    options = {"batch_size": BATCH}
    if is_dataset:
        data = (tf.data.Dataset.from_tensor_slices(data).batch(BATCH),)
        options = {}
    losses = train(model, *data, after=after, epochs=epochs, logdir=logdir, **options)
    return losses is None, np.asarray(model.get_weights()[0])[:, 0].round(4)


@pytest.mark.nightly(1)
@pytest.mark.core(2)
@pytest.mark.usefixtures("unseeded")
def test_without_a_seed_every_row_is_trained_once_in_each_epoch(shared_path):
    for after in (5, 50):
        assert train_counting(shared_path / "run", after, epochs=2)[0]
    interrupted, counts = train_counting(shared_path / "run", 0, epochs=2)
    assert not interrupted
    np.testing.assert_array_equal(counts, 2)


@pytest.mark.nightly(1)
def test_every_epoch_of_a_dataset_is_trained_to_its_end(shared_path):
    """Batches that were repeated are no part of later epochs."""
    for after in (30, 50 + 30):
        assert train_counting(shared_path / "run", after, epochs=4, is_dataset=True)[0]
    interrupted, counts = train_counting(shared_path / "run", 0, epochs=4, is_dataset=True)
    assert not interrupted
    assert counts.min() == 4 and counts.max() == 6, counts  # the first rows also before each interruption


def test_another_batch_size_goes_on_after_as_many_batches(shared_path):
    x = np.ones((ROWS, 2), "float32")

    def run(batch_size, after=0):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        interrupt = Interrupt(after)
        given = {"batch_size": batch_size, "epochs": 2, "logdir": shared_path / "run", "callbacks": [interrupt]}
        try:
            hk.fit(model, x, x[:, :1], verbose=0, **given)
        except SystemExit as ended:
            assert ended.code == 75
        return int(model.optimizer.iterations)

    assert 30 <= run(8, after=30) < 50  # one epoch of 25 batches of 16, and some of the second
    assert run(16) == 50


def test_a_run_on_arrays_goes_on_with_global_batches(shared_path):
    x = np.ones((ROWS, 2), "float32")
    for epochs, data in ((1, None), (2, hk.data.GlobalBatches((x, x[:, :1]), BATCH, shuffle_seed=0))):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        given = {"epochs": epochs, "verbose": 0, "logdir": shared_path / "run"}
        if data is None:
            hk.fit(model, x, x[:, :1], batch_size=BATCH, **given)
        else:
            assert hk.fit(model, data, **given).epoch == [1]
    assert int(model.optimizer.iterations) == 2 * 50
