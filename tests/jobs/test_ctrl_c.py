"""Ctrl-C under plain mpirun: the last line says that nothing was saved, if there is no logdir, and the remedy."""

from __future__ import annotations

import signal
import subprocess

import pytest
from helpers.jobs import BIN, environment
from helpers.speed import WAIT

PROGRAM = """
import hvdkit as hk
import keras, numpy as np
hk.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hk.fit(model, np.zeros((64, 2)), np.zeros((64, 1)), epochs=100_000, verbose=2)
"""


@pytest.mark.parametrize("launcher", [("mpirun", "--bind-to", "none")], ids=["mpirun"])
def test_without_a_logdir_the_last_line_says_that_nothing_was_saved(tmp_path, launcher):
    (tmp_path / "train.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [*launcher, "-np", "2", str(BIN / "python"), str(tmp_path / "train.py")],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Epoch 3/"):
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=WAIT) != 0
    finally:
        process.kill()
        process.wait()
    notices = [line for line in lines if "nothing was saved" in line]
    assert notices == [lines[-1]], lines[-5:]
    assert "hk.fit(logdir='runs/a') saves the run, and the same command continues it" in lines[-1]
