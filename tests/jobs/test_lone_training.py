"""Ranks that train without combining gradients report it at the end of the program."""

from __future__ import annotations

from helpers.jobs import MPI, run

PROGRAM = """
import hvdkit as hk
hk.init()
import keras, numpy as np
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hk.broadcast_variables(model.variables)
model.fit(np.ones((64, 3)), np.ones((64, 1)), verbose=0)
print("done")
"""


def test_one_short_fit_is_reported_on_every_rank():
    job = run(PROGRAM, MPI, 2)
    assert job.code == 0 and job.output.count("done") == 2, job.output
    assert job.output.count("no gradients have been combined") == 2, job.output
