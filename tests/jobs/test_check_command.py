"""``hvdkit check`` of whole programs: right, wrong on purpose, and programs that cannot be compared."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.jobs import call, environment

ROOT = Path(__file__).resolve().parents[2]
START = """
import hvdkit as hk

hk.init()
import keras
import numpy as np

x = np.random.normal(size=(200, 8)).astype("float32")
y = (x[:, :1] * x[:, 1:2] > 0).astype("float32")
layers = keras.layers
"""
# Without a seed, with augmentation and dropout, a callback that writes files, a folder, and work after the training.
RIGHT = """
import sys

images = [layers.Reshape((4, 2, 1)), layers.RandomFlip(), layers.Flatten()]
model = keras.Sequential([*images, layers.Dense(16, "relu"), layers.Dropout(0.5), layers.Dense(1, "sigmoid")])
model.compile(sys.argv[1], "binary_crossentropy", metrics=["accuracy"])
saves = keras.callbacks.ModelCheckpoint("written.keras", save_freq=1)
hk.fit(model, x, y, batch_size=30, epochs=9, logdir="run", callbacks=[saves], verbose=0)
open("after", "w")
"""
# Divides its loss by the number of ranks, as programs for Horovod's Sum do.
WRONG = """
class Scaled(keras.Sequential):
    def compute_loss(self, *arguments, **named):
        return super().compute_loss(*arguments, **named) / hk.size()

model = Scaled([keras.Input((8,)), layers.Dense(1, "sigmoid")])
model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])
hk.fit(model, x, y, batch_size=40, epochs=9, verbose=0)
"""
# Draws the order of its rows from a generator that nothing seeds.
OTHER_ROWS = """
order = np.random.default_rng().permutation(200)
order = hk.broadcast_object(order)
model = keras.Sequential([keras.Input((8,)), layers.Dense(1, "sigmoid")])
model.compile("sgd", "mse")
hk.fit(model, x[order], y[order], batch_size=40, shuffle=False, verbose=0)
"""


def check(folder, *words):
    command = [sys.executable, "-m", "hvdkit", "check", *words]
    return call(command, cwd=folder, env=environment(PYTHONPATH=str(ROOT)))


@pytest.mark.nightly
def test_a_program_that_is_right(tmp_path):
    (tmp_path / "right.py").write_text(START + RIGHT)
    right = check(tmp_path, "-np", "2", "right.py", "adam")
    assert right.returncode == 0, right.stdout + right.stderr
    assert right.stdout.splitlines()[-1].startswith("equal: 2 ranks compute what one process does"), right.stdout
    assert "3 steps on 1 rank and on 2 ranks" in right.stdout
    assert "own random numbers: random_flip, dropout" in right.stdout
    assert re.search(r"^loss +loss +\d\.\d+ +\d\.\d+", right.stdout, re.MULTILINE) and "dense/kernel" in right.stdout
    gradients = re.findall(r"^gradient +(\S+)", right.stdout, re.MULTILINE)  # the first step builds the model
    assert len(gradients) == 4 and gradients == re.findall(r"^variable +(\S+)", right.stdout, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["right.py"]  # nothing is written


@pytest.mark.core
def test_a_program_that_is_wrong(tmp_path):
    (tmp_path / "wrong.py").write_text(START + WRONG)
    wrong = check(tmp_path, "-np", "2", "--steps", "1", "--", "python", "wrong.py")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "likely cause: every gradient is 0.5 times that of one process" in wrong.stdout
    assert "hk.size()" in wrong.stdout and wrong.stdout.splitlines()[-1].startswith("different: ")


@pytest.mark.nightly
def test_programs_that_cannot_be_compared_have_a_clear_last_line(tmp_path):
    for name, program, code, message in (
        ("rows.py", OTHER_ROWS, 1, "the two runs read different rows in their first batch"),
        ("no_fit.py", "print(hk.size())", 2, "no_fit.py, which has ended on 1 rank without a step of hk.fit"),
        ("fails.py", "raise OSError('no data')", 1, "hvdkit check: fails.py failed on 1 rank with exit code 1"),
    ):
        (tmp_path / name).write_text(START + program)
        done = check(tmp_path, "-np", "2", name)
        assert done.returncode == code, done.stdout + done.stderr
        printed = done.stdout if name == "rows.py" else done.stderr.splitlines()[-1]
        assert message in printed, done.stdout + done.stderr
        if name == "fails.py":
            assert "no data" in done.stderr
