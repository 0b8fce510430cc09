"""Ranks that train without combining gradients report it; an exchange of the program's own is enough."""

from __future__ import annotations

import pytest
from helpers.jobs import MPI, run

PROGRAM = """
import sys
import hvdkit as hk
hk.init()
import keras, numpy as np
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hk.broadcast_variables(model.variables)
class Average(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if "CASE" == "weights":
            self.model.set_weights(hk.grouped_allreduce(self.model.get_weights()))
        hk.allreduce(logs["loss"])  # the mean of a number combines no gradients
model.fit(np.ones((64, 3)), np.ones((64, 1)), epochs=EPOCHS, callbacks=[Average()], verbose=0)
print("done")
"""


@pytest.mark.core
def test_every_rank_reports_it_at_the_end_of_a_short_program():
    job = run(PROGRAM.replace("EPOCHS", "1"), MPI, 2)
    assert job.code == 0 and job.output.count("done") == 2, job.output
    assert job.output.count("no gradients have been combined") == 2, job.output


def test_weights_that_the_program_averages_are_enough():
    job = run(PROGRAM.replace("EPOCHS", "2").replace("CASE", "weights"), MPI, 2)
    assert job.code == 0 and job.output.count("done") == 2, job.output
    assert "no gradients have been combined" not in job.output, job.output
