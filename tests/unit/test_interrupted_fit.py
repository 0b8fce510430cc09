"""Ctrl-C in hk.fit: a line says that nothing was saved, if nothing was."""

from __future__ import annotations

import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

import hvdkit as hk


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def test_a_run_without_a_logdir_says_that_nothing_was_saved(tmp_path, capfd):
    hk.init()
    x = np.zeros((4, 2))

    def interrupted(*callbacks, **options):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.raises(KeyboardInterrupt):
            hk.fit(model, x, x[:, :1], callbacks=[*callbacks, Interrupt()], verbose=0, **options)
        return "interrupted: nothing was saved; hk.fit(logdir='runs/a')" in capfd.readouterr().err

    assert interrupted()
    assert not interrupted(logdir=tmp_path / "run")
    assert not interrupted(keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"))


PROGRAM = """
import os, signal, sys, time
import hvdkit as hk
import keras, numpy as np
hk.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
class Act(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        {act}
hk.fit(model, np.zeros((4, 2)), np.zeros((4, 1)), epochs=2, callbacks=[Act()], verbose=0)
print("trained")
"""
ENDED = "ended by SIGTERM: nothing was saved; hk.fit(logdir='runs/a') saves the run"


def run(act):
    program = PROGRAM.format(act=act)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)


@pytest.mark.nightly
def test_a_run_that_sigterm_ends_says_that_nothing_was_saved():
    """As after Ctrl-C under mpirun, which sends SIGTERM; the main thread may be blocked in a collective."""
    done = run("os.kill(os.getpid(), signal.SIGTERM); time.sleep(100)")
    assert done.returncode == -signal.SIGTERM and done.stderr.count(ENDED) == 1, done.stderr
    blocked = (
        "import ctypes, threading; threading.Timer(1, os.kill, (os.getpid(), 15)).start(); ctypes.CDLL(None).pause()"
    )
    done = run(f"{blocked}; ctypes.CDLL(None).sleep(100)")
    assert done.returncode == -signal.SIGTERM and done.stderr.count(ENDED) == 1, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    "act",
    [
        "pid = os.fork() or time.sleep(100); os.kill(pid, signal.SIGTERM); os.waitpid(pid, 0)",  # as workers are ended
        "signal.signal(signal.SIGTERM, lambda *_: None); os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.5)",
        "sys.exit(0) if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else None",
    ],
    ids=["of a child", "of a program that handles it", "none"],
)
def test_other_signals_do_not_end_a_run(act):
    done = run(act)
    assert done.returncode == 0 and "trained" in done.stdout and "SIGTERM" not in done.stderr, done.stderr
