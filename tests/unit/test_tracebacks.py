"""Tracebacks show the user's lines; frames of libraries between them are folded."""

from __future__ import annotations

import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers.tiers import after_core

import hvdkit as hk
from hvdkit.data.division import divide
from hvdkit.machine.terminal import aligned
from hvdkit.watchdog.tracebacks import format_exception


def failure(call):
    with pytest.raises(Exception) as raised:
        call()
    return raised.value


def frames(error):
    return [line.strip() for line in format_exception(error) if line.startswith(("  File", "  ..."))]


def test_an_error_that_hvdkit_raises_shows_the_users_lines_only():
    error = failure(lambda: divide("dataset", ("columns",)))
    shown = frames(error)
    assert all("test_tracebacks.py" in line or line.startswith("... ") for line in shown), shown
    assert "1 frame of hvdkit (keras.config.disable_traceback_filtering() shows them)" in shown[-1]
    assert format_exception(error)[-1].startswith("ValueError: ")


PROGRAM = """
import numpy as np

import hvdkit as hk


def train():
    {0}


{1}
train()
"""


def outcome(folder, *parts):
    """Return exit code, standard output and the lines of the traceback of a program with these parts."""
    (folder / "train.py").write_text(PROGRAM.format(*parts))
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    return done.returncode, done.stdout, lines[lines.index("Traceback (most recent call last):") :]


@pytest.mark.parametrize(
    "call", after_core(["hk.fit(None, np.ones(3))", "print(hk.rank())", "hk.allreduce(1)"], but=["print(hk.rank())"])
)
def test_a_forgotten_init_shows_the_users_lines_and_the_remedy(tmp_path, call):
    code, _, lines = outcome(tmp_path, call, "")
    files = [line.split(", line")[0] for line in lines if line.startswith("  File")]
    assert files == [f'  File "{tmp_path / "train.py"}"'] * 2, lines
    assert f"    {call}" in lines
    remedy = "not called yet, expected before any other call; add it at the top of the script"
    assert code == 1 and lines[-1] == f"hvdkit.errors.ClusterError: hk.init(): {remedy}"


@pytest.mark.full
def test_a_program_that_catches_it_and_calls_init_ends_as_others(tmp_path):
    """Its uncaught errors still set hvdkit's exit codes."""
    caught = "try:\n    hk.rank()\nexcept hk.ClusterError:\n    hk.init()\n    print(hk.size())"
    code, output, lines = outcome(tmp_path, "raise hk.NonFiniteError('the loss is NaN')", caught)
    assert code == hk.NonFiniteError.exit_code and output == "1\n", lines


def test_frames_of_keras_around_an_error_of_the_user_are_folded():
    hk.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", lambda y_true, y_pred: y_pred.missing)
    keras.config.disable_traceback_filtering()
    try:
        error = failure(lambda: hk.fit(model, np.zeros((4, 2)), np.zeros((4, 1)), verbose=0))
        assert not any(line.startswith("... ") for line in frames(error))
    finally:
        keras.config.enable_traceback_filtering()
    shown = frames(error)
    assert any(line.startswith("... ") and "hvdkit and keras" in line for line in shown), shown
    assert sum("test_tracebacks.py" in line for line in shown) >= 3 and len(shown) < 10, shown


def test_an_error_of_a_library_shows_where_it_is_raised():
    shown = frames(failure(lambda: keras.layers.Dense(-1)))
    assert "keras" in shown[-1] and not shown[-1].startswith("..."), shown


def test_an_error_in_frames_that_keras_has_cut_is_no_defect_of_hvdkit():
    hk.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    shown = frames(failure(lambda: hk.fit(model, np.zeros((4, 2)), np.zeros((4, 3, 2)), verbose=0)))
    assert "hvdkit and keras" in shown[-1], shown
    assert not any("hvdkit/keras" in line for line in shown), shown


def test_a_defect_of_hvdkit_and_causes_are_shown_as_python_does():
    error = failure(lambda: aligned([("one",), ("two", "cells")]))  # as if a row of a table lacked a cell
    assert "terminal.py" in frames(error)[-1]

    def chained():
        try:
            raise KeyError("first")
        except KeyError as cause:
            raise ValueError("second") from cause

    lines = format_exception(failure(chained))
    assert "The above exception was the direct cause of the following exception:" in lines
    assert lines.index("KeyError: 'first'") < lines.index("ValueError: second") == len(lines) - 1


def test_an_error_in_a_graph_shows_where_the_user_defined_it():
    hk.init()
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(100, 2), keras.layers.Flatten()])
    model.compile("sgd", "mse")
    ids = np.full((8, 4), 106)
    error = failure(lambda: hk.fit(model, ids, np.zeros((8, 8)), verbose=0))
    lines = format_exception(error)
    assert any("Detected at node" in line and "embedding" in line for line in lines), lines
    assert any("106 is not in [0, 100)" in line for line in lines), lines
    shown = frames(error)
    assert not any("traceback_utils.py" in line or "hvdkit/keras" in line for line in shown), shown
