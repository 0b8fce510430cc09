"""Ranks that train without combining gradients; more in tests/unit and, about the end of a program, in tests/jobs."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdkit as hk
from hvdkit.machine import launcher

pytestmark = pytest.mark.core


class Log(keras.callbacks.Callback):
    """Averages the loss of each epoch, which combines no gradients."""

    def on_epoch_end(self, epoch, logs=None):
        hk.allreduce(logs["loss"])


class Average(keras.callbacks.Callback):
    """Averages all weights after each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.set_weights(hk.grouped_allreduce(self.model.get_weights()))


def test_every_rank_reports_it_and_an_exchange_of_the_program_is_enough(size, capfd):
    if launcher.launched_rank().controller == "gloo":
        pytest.skip("tests/jobs/test_failures.py: under Gloo a second hk.init() is refused")
    hk.shutdown()
    said = []
    for callbacks in ([Log()], [Log(), Average()]):
        capfd.readouterr()
        hk.init()  # nothing has been combined in this world
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        hk.broadcast_variables(model.variables)
        model.fit(np.ones((64, 3)), np.ones((64, 1)), epochs=2, callbacks=callbacks, verbose=0)
        hk.shutdown()
        said.append(capfd.readouterr().err.count("no gradients have been combined"))
    hk.init()
    assert hk.allgather_object(said) == [[1, 0]] * size
