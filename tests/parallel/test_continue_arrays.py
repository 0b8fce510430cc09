"""``hk.fit`` on arrays with a ``logdir``, interrupted in an epoch: the next call reads the rows that are left."""

from __future__ import annotations

import os
import signal

import keras
import numpy as np
import pytest

import hvdkit as hk

pytestmark = [pytest.mark.usefixtures("removed"), pytest.mark.ranks(1, 2, 3)]
ROWS, BATCH = 397, 8  # the last of 50 batches is short, and its shares are uneven


class Interrupt(keras.callbacks.Callback):
    """Interrupts the run as a cluster does, after a number of its batches."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train(model, x, y, *, after=0, **options):
    """Run the user's script; return the losses of its epochs, or None if it was interrupted."""
    try:
        return hk.fit(model, x, y, batch_size=BATCH, verbose=0, callbacks=[Interrupt(after)], **options).history["loss"]
    except SystemExit as ended:
        assert ended.code == 75
        return None


@pytest.mark.parametrize("shuffle", [pytest.param(True, marks=pytest.mark.core(2)), False, "batch"])
def test_a_run_with_a_seed_equals_one_that_was_not_interrupted(shared_path, shuffle):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    y = x.sum(1, keepdims=True)

    def run(name, after=0):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dropout(0.2)])
        model.add(keras.layers.Dense(1))
        model.compile("adam", "mse")
        losses = train(model, x, y, after=after, epochs=3, shuffle=shuffle, logdir=shared_path / name)
        return losses, [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]

    losses, expected = run("whole")
    assert len(losses) == 3
    for after in (5, 50):  # it ends some steps later: in the first epoch, and in the second
        assert run("parts", after)[0] is None
    continued, weights = run("parts")
    assert len(continued) == 2 and continued[-1] == losses[-1]
    for got, whole in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(got, whole)


@pytest.fixture
def unseeded():
    """Take back the seed that an earlier test has set in this process."""
    import tensorflow.python.eager.context as context

    before = context.global_seed()
    context.set_global_seed(None)
    yield
    context.set_global_seed(before)


@pytest.mark.core(2)
@pytest.mark.usefixtures("unseeded")
def test_without_a_seed_every_row_is_trained_once_in_each_epoch(shared_path):
    ids = np.arange(400)  # 50 full batches

    def run(after=0):
        model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(400, 1, "zeros")])
        model.compile(keras.optimizers.SGD(float(BATCH)), lambda y, out: -out)  # adds 1 to the row of each id
        losses = train(model, ids[:, None], np.zeros(400), after=after, epochs=2, logdir=shared_path / "run")
        return losses, np.array(model.get_weights()[0])[:, 0]

    for after in (5, 50):
        losses, _ = run(after)
        assert losses is None
    losses, counts = run()
    assert len(losses) == 1
    np.testing.assert_allclose(counts, 2.0, rtol=1e-6)


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
