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


def test_every_rank_reports_it_at_the_end_of_a_short_program():
    job = run(PROGRAM.replace("EPOCHS", "1"), MPI, 2)
    assert job.code == 0 and job.output.count("done") == 2, job.output
    assert job.output.count("no gradients have been combined") == 2, job.output


@pytest.mark.nightly
def test_what_is_evaluated_afterwards_does_not_hide_it():
    """An evaluation combines arrays, such as the thresholds of AUC, and predictions, but no gradients."""
    evaluated = (
        'model.compile("sgd", "mse", metrics=[keras.metrics.AUC()])\n'
        "model.fit(np.ones((64, 3)), np.ones((64, 1)), verbose=0)\n"
        "hk.evaluate(model, np.ones((64, 3)), np.ones((64, 1)), verbose=0)\n"
        "hk.predict(model, np.ones((64, 3)), verbose=0)\n"
    )
    job = run(PROGRAM.partition("class Average")[0] + evaluated, MPI, 2)
    assert job.code == 0, job.output
    # At the end of each rank, and within it, if that takes seconds.
    assert job.output.count("no gradients have been combined") in (2, 3, 4), job.output


def test_the_last_line_of_a_program_that_then_fails_names_it():
    """All ranks save to one file, as a program for one process does: an error that says nothing of the cause."""
    saves = "if hk.rank() == 1:\n    raise OSError('unable to lock file')\nhk.barrier()"
    job = run(PROGRAM.replace("EPOCHS", "1").replace('print("done")', saves), MPI, 2)
    assert job.code == 1, job.output
    (last,) = [line for line in job.output.splitlines() if "failed: OSError" in line]
    assert "unable to lock file; before it: no gradients have been combined: each of 2 ranks" in last, job.output


@pytest.mark.nightly
def test_weights_that_the_program_averages_are_enough():
    job = run(PROGRAM.replace("EPOCHS", "2").replace("CASE", "weights"), MPI, 2)
    assert job.code == 0 and job.output.count("done") == 2, job.output
    assert "no gradients have been combined" not in job.output, job.output


# Started again after its last step: the optimizer's iterations come from the checkpoint.
FINISHED = """
import os
os.chdir("FOLDER")
import hvdkit as hk
hk.init()
import keras, numpy as np
x, y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
if "KIND" == "loop":
    batches = hk.data.GlobalBatches((x, y), 16, epochs=2)
    optimizer.build(model.trainable_variables)
    with hk.Supervisor("run", model=model, optimizer=optimizer, data=batches) as sv:
        for images, labels in sv.batches():
            loss, gradients = keras.ops.zeros(()), [keras.ops.zeros(v.shape) for v in model.trainable_variables]
            optimizer.apply(hk.average_gradients(gradients), model.trainable_variables)
            sv.step(loss=loss)
else:
    backup = "KIND" == "backup" and [keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False)]
    model.compile(optimizer, "mse")
    hk.fit(model, x, y, epochs=2, verbose=0, callbacks=backup or None, logdir=None if backup else "run")
print("iterations", int(getattr(model, "optimizer", optimizer).iterations))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ("fit", "loop", "backup"))
def test_a_run_that_has_finished_reports_nothing(tmp_path, kind):
    for is_finished in (False, True):
        job = run(FINISHED.replace("FOLDER", str(tmp_path)).replace("KIND", kind), MPI, 2)
        assert job.code == 0 and job.output.count("iterations") == 2, job.output
        assert "iterations 0" not in job.output and "no gradients have been combined" not in job.output, job.output
        last = "nothing to train: the run is already at step" if is_finished else "; newest checkpoint: run/"
        assert kind == "backup" or job.output.count(last) == 1, job.output
