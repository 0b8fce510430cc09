"""A misspelled name in an uncaught exception: the report suggests the right one, whatever Python's version."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

from hvdkit.watchdog.suggestions import add_suggestion

START = """
import keras
import numpy as np

import hvdkit as hk

x = np.ones((8, 4), "float32")
y = x[:, :1]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
"""


def message(tmp_path, line):
    """Return the message of the exception that a program with this last line raises."""
    (tmp_path / "train.py").write_text(f"{START}\n{line}\n")
    with pytest.raises(Exception) as raised:
        runpy.run_path(str(tmp_path / "train.py"))
    add_suggestion(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hk.fit(model, x, y, batchsize=4)", "batch_size"),
        ("hk.fit(\n    model,\n    x,\n    y,\n    epoch=len(x),\n)", "epochs"),
        ("hk.fit(model, x, y, **{'log_dir': 'runs/x'})", "logdir"),
        ("hk.evaluate(model, x, y, batchsize=4)", "batch_size"),
        ("from hvdkit import predict\n\n\ndef run():\n    predict(model, x, batchsize=4)\n\n\nrun()", "batch_size"),
        ("hk.Supervisor('runs/x', save_step=10)", "save_steps"),
        ("hk.DistributedOptimizer(keras.optimizers.SGD(0.1), compresion=None)", "compression"),
        (
            "hk.init()\ncallback = hk.callbacks.SupervisorCallback('runs/x', save_model_sec=3)\n"
            "hk.fit(model, x, y, verbose=0, callbacks=[callback])",
            "save_model_secs",
        ),
        ("hk.callbacks.LearningRateWarmup(step=3)", "steps"),
        ("hk.layers.ShardedEmbedding(10, 4, embedding_initializer='zeros')", "embeddings_initializer"),
        ("hk.data.GlobalBatches(x, 4, epoch=3)", "epochs"),
        ("hk.fitt(model, x, y)", "fit"),
        ("modle.fit(x, y)", "model"),
    ],
)
def test_a_misspelled_name(tmp_path, line, expected):
    text = message(tmp_path, line)
    is_pythons = sys.version_info >= (3, 12) and "keyword" not in text  # added by the traceback module
    assert text.endswith(f"Did you mean {expected!r}?") != is_pythons, text
    assert text.count("Did you mean") == (not is_pythons)


@pytest.mark.parametrize(
    "line",
    [
        "hk.fit(model, x, y, colour=4)",  # nothing is close
        "def fit(model, *, rate=1):\n    pass\n\n\nfit(model, batchsize=4)",  # another function of the same name
        "[].sort(revers=True, kye=len)",  # built in
        "hk.fit(model, x, y)()",
        "raise TypeError('fit() got an unexpected keyword argument \\'batchsize\\'')",
        "raise TypeError",
    ],
)
def test_no_suggestion_is_better_than_a_wrong_one(tmp_path, line):
    if sys.version_info < (3, 13):
        assert "Did you mean" not in message(tmp_path, line)


@pytest.mark.nightly
def test_a_program_that_misspells_a_keyword(tmp_path):
    """Its last line is that of the traceback, with the suggestion."""
    (tmp_path / "train.py").write_text(START.replace("import hvdkit as hk\n", "import hvdkit as hk\n\nhk.init()\n"))
    with (tmp_path / "train.py").open("a") as file:
        file.write("hk.fit(model, x, y, batchsize=4, epochs=2)\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last == "TypeError: fit() got an unexpected keyword argument 'batchsize'. Did you mean 'batch_size'?"
    assert "strategies.py" not in done.stderr and "contextlib.py" not in done.stderr, done.stderr
