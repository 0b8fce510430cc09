"""fit averages, or fails with a reason: mixed precision, wrong nesting, XLA; Horovod's own layer fails the check."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import raises_on_several

import hvdkit as hk

pytestmark = pytest.mark.core(2)

opts = keras.optimizers


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def spread_after_fit(optimizer):
    """Fit on data that differ by rank, from equal weights; return the largest difference of the ranks' weights."""
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(hk.rank())
    model.fit(rng.normal(size=(64, 4)), rng.normal(size=(64, 1)) + hk.rank(), batch_size=4, verbose=0)
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    return float(np.max(hk.allreduce(weights, hk.Max) - hk.allreduce(weights, hk.Min)))


@pytest.mark.ranks(2, 3)
def test_fit_averages_and_the_check_would_notice():
    """Horovod's own Keras optimizer fails the same check on Keras 3: it runs, raises no error and does not average."""
    import horovod.tensorflow.keras as raw

    assert spread_after_fit(hk.DistributedOptimizer(opts.SGD(0.05))) == 0.0
    unaveraged = spread_after_fit(raw.DistributedOptimizer(opts.SGD(0.05)))
    assert (unaveraged > 0.01) == (hk.size() > 1)


def test_mixed_float16_in_fit_scales_the_loss(mixed_float16):
    optimizer = hk.DistributedOptimizer(opts.SGD(0.05))
    assert isinstance(optimizer, opts.LossScaleOptimizer)
    assert spread_after_fit(optimizer) == 0.0
    assert int(optimizer.step_counter) > 0
    # The first scale may be too large for float16: all ranks skip such steps.
    assert 8 <= int(optimizer.iterations) <= 16
    assert hk.compare_variables(optimizer.variables)


def test_mixed_float16_in_a_loop_without_scale_loss_does_not_unscale(mixed_float16):
    optimizer = hk.DistributedOptimizer(opts.SGD(1.0))
    variable = keras.Variable([0.0])
    optimizer.apply([tf.constant([2.0])], [variable])
    np.testing.assert_allclose(variable.numpy(), [-2.0])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_on_one_rank_is_skipped_by_all(accumulate):
    optimizer = hk.DistributedOptimizer(
        opts.LossScaleOptimizer(opts.SGD(1.0), initial_scale=4.0), accumulate_steps=accumulate
    )
    variable = keras.Variable([1.0])
    optimizer.build([variable])

    @tf.function
    def step(value):
        optimizer.scale_loss(tf.constant(0.0))
        optimizer.apply([tf.reshape(value, [1])], [variable])

    last = hk.rank() == hk.size() - 1
    step(tf.constant(np.inf if last else 8.0, tf.float32))
    assert float(optimizer.dynamic_scale) == 2.0
    np.testing.assert_allclose(variable.numpy(), [1.0])
    for _ in range(accumulate):
        step(tf.constant(2.0 * hk.rank(), tf.float32))  # unscaled: rank
    np.testing.assert_allclose(variable.numpy(), [1.0 - (hk.size() - 1) / 2])
    assert hk.compare_variables(optimizer.variables)


def test_xla_is_refused_in_fit():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hk.DistributedOptimizer(opts.SGD(0.1)), "mse", jit_compile=True)
    x = np.zeros((4, 2), "f4")
    with raises_on_several(hk.HvdkitError, "jit_compile=False"):
        model.fit(x, x[:, :1], verbose=0)
