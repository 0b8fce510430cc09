"""hvdkit.compat.horovod in one process: what is refused, schedules of the rate, and loaded models."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdkit as hk
import hvdkit.compat.horovod as hvd

hk.init()


def test_what_hvdkit_does_not_do_is_refused():
    with pytest.raises(ValueError, match="average_aggregated_gradients"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="local_variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[])
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateWarmupCallback(0.0)


@pytest.mark.parametrize("staircase", [True, False])
def test_a_schedule_multiplies_the_rate(staircase):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    schedule = hvd.callbacks.LearningRateScheduleCallback
    callbacks = [
        schedule(initial_lr=0.1, multiplier=lambda epoch: 1 / (1 + epoch), end_epoch=2, staircase=staircase),
        schedule(initial_lr=0.1, multiplier=0.01, start_epoch=2),
        Watch(),
    ]
    model.fit(np.zeros((8, 2)), np.zeros((8, 1)), batch_size=4, epochs=3, callbacks=callbacks, verbose=0)
    inner = [0.1, 0.1, 0.05, 0.05] if staircase else [0.1, 0.1 / 1.5, 0.05, 0.1 / 2.5]
    np.testing.assert_allclose(rates, [*inner, 0.001, 0.001], rtol=1e-6)


def test_a_saved_model_comes_back_distributed(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", compression=hvd.Compression.fp16)
    assert loaded.optimizer._hvdkit.compression == "fp16"
