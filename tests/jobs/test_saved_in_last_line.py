"""The last line of a job that failed says what its run has saved, and the same command continues from there."""

from __future__ import annotations

import re
import sys

import pytest
from helpers.jobs import call, environment
from helpers.jobs_that_fail import HVDKIT_LINE, LAUNCHERS
from helpers.tiers import at_night

PROGRAM = """
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import hvdkit as hk

hk.init()
x = np.random.default_rng(0).normal(size=(640, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")


class LosesRank(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        has_saved = any(Path("runs/x/checkpoints").glob("step-*"))
        if hk.rank() == 1 and (sys.argv[1] == "at once" or has_saved):
            os.kill(os.getpid(), signal.SIGKILL)


last = int(sys.argv[2])
hk.fit(model, x, x[:, :1], batch_size=64, epochs=last, verbose=0, callbacks=[LosesRank()], logdir="runs/x")
"""


@pytest.mark.parametrize("launcher", at_night(["mpirun", "hvdkit run"], but=["hvdkit run"]))
def test_a_killed_rank_and_a_save(tmp_path, launcher):
    (tmp_path / "train.py").write_text(PROGRAM)
    program = [sys.executable, "train.py", "once saved"]
    done = call([*LAUNCHERS[launcher], "-np", "2", *program, "500"], cwd=tmp_path, env=environment())
    assert done.returncode, done.stdout
    last = [line for line in done.stderr.splitlines() if HVDKIT_LINE.match(line)][-1]
    end = re.search(r"; saved at step (\d+) in runs/x: the same command continues from there$", last)
    assert end is not None, done.stderr
    assert "rank 1 on " in last and last.count("the same command") == 1
    again = call([*program, "1"], cwd=tmp_path, env=environment())
    assert again.returncode == 0, again.stderr
    assert f"training begins at step {end[1]} from runs/x/checkpoints/step-{int(end[1]):09}" in again.stderr


@pytest.mark.nightly
def test_a_killed_rank_before_the_first_save(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [*LAUNCHERS["horovodrun --gloo"], "-np", "2", sys.executable, "train.py", "at once", "500"]
    done = call(command, cwd=tmp_path, env=environment())
    assert done.returncode, done.stdout
    output = done.stdout + done.stderr
    last = [line for line in output.splitlines() if HVDKIT_LINE.match(line)][-1]
    assert last.endswith("; nothing was saved yet in runs/x: the same command starts from the beginning"), output
