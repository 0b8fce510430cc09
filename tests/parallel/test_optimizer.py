"""Optimizers in fit and in loops: N ranks with a global batch equal one process on the same examples."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import raises_on_several, same_values

import hvdkit as hk

BATCH, STEPS = 24, 4
opts = keras.optimizers
# Optimizers with special handling in fit; the others only differ in their update rules (test_optimizer_options.py).
MAKERS = {
    "Adam": lambda: opts.Adam(0.01),
    "LossScaleOptimizer": lambda: opts.LossScaleOptimizer(opts.SGD(0.1)),
    "MultiOptimizer": lambda: opts.MultiOptimizer(opts.OptimizerMap(opts.SGD(0.1), {".*/bias": opts.Adam(0.01)})),
    "ScheduleFreeAdamW": lambda: opts.ScheduleFreeAdamW(0.01),
}
IN_FIT = [name for name in MAKERS if hasattr(opts, name)]


def examples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, 6)).astype("f4")
    return x, rng.normal(size=(BATCH * STEPS, 1)).astype("f4")


def local(array, rank=None, size=None):
    """Return this rank's rows of every global batch, concatenated, and their number per batch."""
    rank, size = hk.rank() if rank is None else rank, hk.size() if size is None else size
    low, high = rank * BATCH // size, (rank + 1) * BATCH // size
    return np.concatenate([array[i + low : i + high] for i in range(0, len(array), BATCH)])


def dense_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])


def fitted(optimizer, *, distributed, **compile_options):
    model = dense_model()
    model.compile(optimizer, "mse", jit_compile=False, **compile_options)
    x, y = examples()
    if distributed:
        x, y = local(x), local(y)
    model.fit(x, y, batch_size=BATCH // (hk.size() if distributed else 1), shuffle=False, epochs=2, verbose=0)
    return model


@pytest.fixture(scope="module")
def fitted_alone():
    """Return the weights that one process fits on all examples, per optimizer; ranks divide the work."""
    mine = {name: fitted(MAKERS[name](), distributed=False).get_weights() for name in IN_FIT[hk.rank() :: hk.size()]}
    return {name: weights for some in hk.allgather_object(mine) for name, weights in some.items()}


def assert_equal(model, reference, rtol=1e-4, atol=3e-6):
    expected = reference if isinstance(reference, list) else reference.get_weights()
    same_values(model.get_weights(), expected, rtol=rtol, atol=atol)
    assert hk.compare_variables(model.variables)


def distributed(name):
    optimizer = hk.DistributedOptimizer(MAKERS[name]())
    assert type(optimizer).__name__ == name and isinstance(optimizer, getattr(opts, name))
    return optimizer


@pytest.mark.parametrize("name", IN_FIT)
def test_fit_equals_one_process(name, fitted_alone):
    assert_equal(fitted(distributed(name), distributed=True), fitted_alone[name])


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 4}])
def test_ways_to_run_a_step(options, fitted_alone):
    assert_equal(fitted(hk.DistributedOptimizer(MAKERS["Adam"]()), distributed=True, **options), fitted_alone["Adam"])


def looped(optimizer, accumulate=1, reduce_loss=tf.reduce_mean):
    """Train by hand on this rank's rows, with ``accumulate`` calls of apply per step."""
    model = dense_model()
    x, y = (local(a).reshape(STEPS, BATCH // hk.size(), -1) for a in examples())

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(reduce_loss(tf.square(model(x) - y)))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    for xs, ys in zip(x, y, strict=True):
        for part in range(accumulate):
            cut = slice(part * len(xs) // accumulate, (part + 1) * len(xs) // accumulate)
            step(xs[cut], ys[cut])
    return model


def alone(optimizer, reduce_loss=tf.reduce_mean, clip=None):
    model = dense_model()
    for xs, ys in zip(*(np.split(a, STEPS) for a in examples()), strict=True):
        with tf.GradientTape() as tape:
            loss = reduce_loss(tf.square(model(xs) - ys))
        grads = tape.gradient(loss, model.trainable_variables)
        if clip:
            grads, _ = tf.clip_by_global_norm(grads, clip)
        optimizer.apply(grads, model.trainable_variables)
    return model


@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("op", "reduce_loss", "accumulate"),
    [(hk.Average, tf.reduce_mean, 1), (hk.Average, tf.reduce_mean, 2), (hk.Sum, tf.reduce_sum, 2)],
    ids=["Average-1", "Average-2", "Sum-2"],
)
def test_loops_with_average_and_sum_and_accumulation(op, reduce_loss, accumulate):
    rate = 0.1 if op == hk.Average else 0.01
    optimizer = hk.DistributedOptimizer(opts.SGD(rate, momentum=0.9), op=op, accumulate_steps=accumulate)
    assert_equal(looped(optimizer, accumulate, reduce_loss), alone(opts.SGD(rate, momentum=0.9), reduce_loss))
    assert int(optimizer.iterations) == STEPS


@pytest.mark.parametrize(
    ("make", "accumulate"),
    [(lambda: opts.SGD(0.1), 2), (lambda: opts.LossScaleOptimizer(opts.SGD(0.1)), 1)],
    ids=["plain", "scaled"],
)
def test_global_norm_is_clipped_after_combining(make, accumulate):
    optimizer = hk.DistributedOptimizer(make(), clip_global_norm=0.3, accumulate_steps=accumulate)
    assert_equal(looped(optimizer, accumulate), alone(opts.SGD(0.1), clip=0.3))


@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_compressed_training_stays_close(compression, tolerance):
    # 11 and 8 bits of mantissa: relative errors of 2**-11 and 2**-8 per step.
    model = looped(hk.DistributedOptimizer(opts.SGD(0.1), compression=compression))
    assert_equal(model, alone(opts.SGD(0.1)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("make", "rows"),
    [(lambda: opts.SGD(0.1), 9), (lambda: opts.Adam(0.01), 5000), (lambda: opts.Adagrad(0.1), 9)],
    ids=["SGD-tiny", "Adam-large", "Adagrad-tiny"],
)
def test_embeddings_equal_one_process(make, rows):
    """Ids repeat within and across ranks; the table of 9 rows is combined dense, the other as rows."""
    ids = np.random.default_rng(2).integers(0, 9, (STEPS * BATCH, 3))
    targets = np.random.default_rng(3).normal(size=(STEPS * BATCH, 1)).astype("f4")

    def model_of():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Embedding(rows, 8), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])

    model = model_of()
    model.compile(hk.DistributedOptimizer(make()), "mse", jit_compile=False)
    model.fit(local(ids), local(targets), batch_size=BATCH // hk.size(), shuffle=False, verbose=0)

    # Keras squares the values of a repeated row one by one, so the reference has the gradient in dense form.
    reference, optimizer = model_of(), make()
    for x, y in zip(np.split(ids, STEPS), np.split(targets, STEPS), strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(reference(x) - y))
        grads = [tf.convert_to_tensor(g) for g in tape.gradient(loss, reference.trainable_variables)]
        optimizer.apply(grads, reference.trainable_variables)
    assert_equal(model, reference)


def test_apply_in_a_branch_that_all_ranks_take_alike():
    variable, optimizer = keras.Variable([0.0]), hk.DistributedOptimizer(opts.SGD(1.0))
    optimizer.build([variable])

    @tf.function
    def step(i):
        if i % 2 == 0:
            optimizer.apply([tf.reshape(tf.cast(hk.rank(), tf.float32), [1])], [variable])

    for i in range(4):
        step(tf.constant(i))
    np.testing.assert_allclose(variable.numpy(), [-(hk.size() - 1.0)])


def variables():
    return [keras.Variable(np.arange(1.0, 4.0, dtype="f4")), keras.Variable([[2.0]])]


@pytest.mark.parametrize("graph", [False, True])
def test_a_loss_scale_around_a_distributed_optimizer_is_refused(graph):
    """A rank that overflows would not call apply, so its next step would be matched with its peers' current one."""
    vs = variables()
    outer = opts.LossScaleOptimizer(hk.DistributedOptimizer(opts.SGD(1.0)))

    def step():
        outer.build(vs)
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
