"""Cases in which a distributed optimizer could silently go wrong."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import raises_on_several

import hvdkit as hk

opts = keras.optimizers


def variables():
    return [keras.Variable(np.arange(1.0, 4.0, dtype="f4")), keras.Variable([[2.0]])]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [lambda: opts.Adam(0.1), lambda: opts.SGD(0.1, momentum=0.9, use_ema=True)])
def test_slots_of_a_built_optimizer_are_kept(make, accumulate):
    """With accumulation the copy has variables that the original lacks; the slots must still be copied."""
    plain, vs = make(), variables()
    plain.apply([tf.fill(v.shape, 3.0) for v in vs], vs)
    copy = hk.DistributedOptimizer(plain, accumulate_steps=accumulate)
    slots = {v.path.split("/", 1)[1]: v.numpy() for v in plain.variables}
    ours = {v.path.split("/", 1)[1]: v.numpy() for v in copy.variables}
    assert set(slots) <= set(ours)
    for name, value in slots.items():
        if name != "iteration":
            np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert int(copy.iterations) == int(plain.iterations) == 1


def test_gradients_that_are_none_stay_out(rank, size):
    vs = variables()
    optimizer = hk.DistributedOptimizer(opts.SGD(1.0))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([tf.fill([3], float(rank)), None], vs)
    np.testing.assert_allclose(vs[0].numpy(), np.arange(1, 4) - (size - 1) / 2)
    assert vs[1].numpy() == [[2.0]]


@pytest.mark.parametrize("graph", [False, True])
def test_a_loss_scale_around_a_distributed_optimizer_is_refused(graph):
    """A rank that overflows would not call apply, so its next step would be matched with its peers' current one."""
    vs = variables()
    outer = opts.LossScaleOptimizer(hk.DistributedOptimizer(opts.SGD(1.0)))
    outer.build(vs)

    def step():
        outer.apply([tf.ones(v.shape) for v in vs], vs)

    with raises_on_several(hk.HvdkitError, "wrap the other way round"):
        (tf.function(step) if graph else step)()


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_loss_scale_around_a_distributed_optimizer_is_refused_in_fit(eagerly, rank):
    """Also on a rank that overflows. Keras adds it if the policy is set after the optimizer is distributed."""
    optimizer = hk.DistributedOptimizer(opts.SGD(1.0))
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse", jit_compile=False, run_eagerly=eagerly)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, opts.LossScaleOptimizer) and model.optimizer.inner_optimizer is optimizer
    with raises_on_several(hk.HvdkitError, "wrap the other way round"):
        model.fit(np.full((4, 2), 1.0 if rank else 6e4), np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize("op", [hk.Average, hk.Sum])
def test_accumulated_rows_and_dense_gradients(op, rank, size):
    """Rows are accumulated over the steps before they are combined; repeated rows count each time."""
    table, bias = keras.Variable(np.zeros((5, 2), "f4")), keras.Variable([0.0])
    optimizer = hk.DistributedOptimizer(opts.SGD(1.0), op=op, accumulate_steps=2)
    optimizer.build([table, bias])
    ids = [[0, 0, rank % 5], [1, 0, 4]]

    @tf.function(reduce_retracing=True)
    def step(ids):
        rows = tf.IndexedSlices(tf.ones([3, 2]), ids, tf.constant([5, 2]))
        optimizer.apply([rows, tf.constant([float(rank)])], [table, bias])

    for row in ids:
        step(tf.constant(row))
    expected = np.zeros((5, 2))
    for r in range(size):
        np.add.at(expected, [0, 0, r % 5, 1, 0, 4], 1.0)
    scale = 1.0 if op == hk.Sum else 1 / (2 * size)
    np.testing.assert_allclose(table.numpy(), -expected * scale, rtol=1e-6)
    np.testing.assert_allclose(bias.numpy(), [-2 * sum(range(size)) * scale], rtol=1e-6)
