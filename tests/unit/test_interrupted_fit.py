"""Ctrl-C in hk.fit: a line says that nothing was saved, if nothing was."""

from __future__ import annotations

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
