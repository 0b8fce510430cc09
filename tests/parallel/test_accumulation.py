"""Gradients that are accumulated when one ``fit`` ends, or is interrupted, count in the next one."""

from __future__ import annotations

import os
import signal

import keras
import numpy as np
import pytest
from helpers.as_one import line, mine, same_weights

import hvdkit as hk

STEPS, ROWS = 10, 6  # per epoch, and per step of all ranks
X, Y = line(np.random.default_rng(3), rows=STEPS * ROWS)


def made(wrap=lambda optimizer: optimizer):
    """Return a model that updates its weights after 7 steps: at the end of an epoch, gradients are left."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(wrap(keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=7)), "mse")
    return model


def twice(fit, *data, **options):
    """Train for one epoch, and then for two more as users go on with a model."""
    fit(*data, epochs=1, **options)
    fit(*data, epochs=3, initial_epoch=1, **options)


@pytest.fixture(scope="module")
def one_process():
    model = made()
    twice(model.fit, X, Y, batch_size=ROWS, shuffle=False, verbose=0)
    return model


@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
def test_the_next_hk_fit_goes_on(one_process):
    model = made()
    twice(lambda *data, **options: hk.fit(model, *data, **options), X, Y, batch_size=ROWS, shuffle=False, verbose=0)
    same_weights(model, one_process, rtol=1e-5)


@pytest.mark.ranks(2, 3)
def test_the_next_plain_fit_goes_on(rank, size, one_process):
    model = made(hk.DistributedOptimizer)
    shares = [mine(array.reshape(STEPS, ROWS, -1).swapaxes(0, 1), rank, size) for array in (X, Y)]
    data = [share.swapaxes(0, 1).reshape(STEPS * ROWS // size, -1) for share in shares]
    options = {"callbacks": [hk.callbacks.BroadcastInitial()], "batch_size": ROWS // size}
    twice(model.fit, *data, shuffle=False, verbose=0, **options)
    same_weights(model, one_process, rtol=1e-5)


def test_what_a_supervisor_restores_is_not_broadcast(rank, size, shared_path):
    data = [mine(array, rank, size) for array in (X, Y)]

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(*callbacks):
        model = made(hk.DistributedOptimizer)
        given = [hk.callbacks.SupervisorCallback(shared_path / "run"), hk.callbacks.BroadcastInitial(), *callbacks]
        model.fit(*data, batch_size=ROWS // size, epochs=1, verbose=0, callbacks=given)
        return model

    with pytest.raises(SystemExit):
        run(Interrupt())

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found.append(np.asarray(self.model.optimizer._accumulated_gradients[0]))

    found: list[np.ndarray] = []
    run(Look())
    everywhere = hk.allgather_object(found[0])
    assert len({each.tobytes() for each in everywhere}) == size, everywhere
