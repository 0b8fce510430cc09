"""Callbacks of fit on ranks that differ: nothing to validate, several steps in one call, random states."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdkit as hk


def model_of(rate=0.0, **compile_options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"], jit_compile=False, **compile_options)
    return model


def test_a_rank_with_nothing_to_validate_changes_nothing():
    """Only rank 0 has validation data; all ranks report its metrics, and early stopping agrees."""
    model = model_of()
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(8, 2)), rng.normal(size=(8, 1))
    rows = 8 if hk.is_chief() else 0

    def validation():
        yield from ((x[i : i + 4], y[i : i + 4]) for i in range(0, rows, 4))

    spec = ((None, 2), (None, 1))
    import tensorflow as tf

    data = tf.data.Dataset.from_generator(
        validation, output_signature=tuple(tf.TensorSpec(s, tf.float32) for s in spec)
    )
    history = model.fit(
        x * 3,
        y,
        epochs=2,
        validation_data=data,
        callbacks=[hk.callbacks.MetricAverage(), keras.callbacks.EarlyStopping("val_loss", patience=5)],
        verbose=0,
    ).history
    model.reset_metrics()
    expected = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    for name, value in expected.items():
        assert history[f"val_{name}"] == pytest.approx([value] * 2, rel=1e-5)


@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_callbacks_count_steps_not_calls(steps_per_execution):
    model = model_of(0.1, steps_per_execution=steps_per_execution)
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append((batch, float(self.model.optimizer.learning_rate)))

    x = np.zeros((20, 2), "f4")
    warmup = hk.callbacks.LearningRateWarmup(10, scale=5.0)
    model.fit(x, x[:, :1], batch_size=1, callbacks=[warmup, Watch()], verbose=0)
    for end, rate in rates:
        start = end - steps_per_execution + 1
        assert rate == pytest.approx(0.1 * (1 + 4 * min(start / 10, 1.0)), rel=1e-5)


def test_a_bad_loss_is_named_with_its_step_under_steps_per_execution():
    model = model_of(0.1, steps_per_execution=5)
    y = np.zeros((20, 1), "f4")
    y[12] = np.nan
    with pytest.raises(hk.NonFiniteError, match=f"step 15 on rank {hk.rank()}"):
        model.fit(
            np.zeros((20, 2)),
            y,
            batch_size=1,
            shuffle=False,
            callbacks=[hk.callbacks.StopOnNonFinite()],
            verbose=0,
        )


def test_initial_broadcast_leaves_random_states_apart():
    keras.utils.set_random_seed(hk.rank())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    x = np.ones((4, 2), "f4")
    model.fit(x, x[:, :1], callbacks=[hk.callbacks.BroadcastInitial()], verbose=0)
    assert hk.compare_variables(model.trainable_variables)
    states = hk.allgather_object([v.numpy().tolist() for v in model.variables if v.name == "seed_generator_state"])
    assert len({str(state) for state in states}) == hk.size()


def test_log_lines_come_every_so_many_steps_from_the_chief(capfd):
    log = hk.callbacks.StepLog(8, every=4)
    for step in range(1, 11):
        log.step(step, 0.5)
    lines = [line for line in capfd.readouterr().err.splitlines() if "loss = 0.5000" in line]
    assert len(lines) == (2 if hk.is_chief() else 0)
