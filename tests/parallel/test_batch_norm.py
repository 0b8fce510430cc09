"""BatchNormalization over ranks equals one process on the global batch: forward, backward, moving statistics."""

from __future__ import annotations

import gc
import weakref
from itertools import cycle

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import raises_on_several, same_values
from helpers.counting import counting
from helpers.pairwise import pairwise, some_at

import hvdkit as hk
from hvdkit.collectives.batch_share import share_of_batch
from hvdkit.optimizer import coupled_layers

opts = keras.optimizers
CHANNELS = 3


@pytest.fixture(autouse=True)
def _no_layers_of_other_tests(monkeypatch):
    monkeypatch.setattr(coupled_layers, "_coupled", weakref.WeakSet())
    monkeypatch.setattr(coupled_layers, "_was_coupled", False)


def rows_of(how, size):
    """Return the number of rows of each rank."""
    return {
        "even": [4] * size,
        "uneven": [2 + 3 * r for r in range(size)],
        "empty": [0 if r == 0 and size > 1 else 5 for r in range(size)],
    }[how]


def part(rows, rank):
    """Return this rank's rows of the global batch."""
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def network(synchronized, inner=(), axis=-1, **options):
    """Return a model with equal initial values, with batch normalization of another layer's output."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((*inner, CHANNELS))
    x = keras.layers.Dense(CHANNELS, name="before")(inputs)
    norm = keras.layers.BatchNormalization(synchronized=synchronized, axis=axis, momentum=0.7, name="norm", **options)
    model = keras.Model(inputs, keras.layers.Dense(2, name="after")(norm(x)))
    if synchronized:
        assert hk.layers.synchronize_batch_normalization(model) == [norm]
    return model


def close(model, reference, grads, expected, tolerance=1e-5):
    """Compare gradients and all variables."""
    same_values(grads, expected, rtol=tolerance, atol=tolerance)
    same_values(model.non_trainable_variables, reference.non_trainable_variables, rtol=tolerance, atol=tolerance)


def example_losses(model, x, y):
    """Return each example's loss."""
    error = tf.square(tf.cast(model(x, training=True), tf.float32) - y)
    return tf.reduce_mean(error, axis=list(range(1, len(error.shape))))


def reference_of(x, y, **options):
    """Return a single process's model after a step on the global batch, and its gradients."""
    model = network(False, **options)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(example_losses(model, x, y))
    return model, tape.gradient(loss, model.trainable_variables)


def data(rng, rows, inner=()):
    x = rng.normal(3.0, 2.0, (rows, *inner, CHANNELS)).astype("f4")
    return x, rng.normal(size=(rows, *inner, 2)).astype("f4")


OPTIONS = [{}, {"renorm": True}, {"dtype": "mixed_bfloat16"}, {"dtype": "float64"}, {"scale": False, "center": False}]
STEPS = zip(
    cycle(["even", "uneven", "empty"]),
    cycle([((), -1), ((4,), -1), ((4,), 1), ((2, 3), -1)]),
    [*["graph"] * 4, *["eager"] * 6],
    OPTIONS * 2,
    strict=False,
)


@pytest.mark.parametrize(("split", "shape", "mode", "options"), some_at((3,), [*STEPS], every=4))
def test_a_step_equals_one_process(split, shape, mode, options, rng, rank, size):
    (inner, axis), rows = shape, rows_of(split, size)
    options = {"inner": inner, "axis": axis, **options}
    x, y = data(rng, sum(rows), inner)
    reference, expected = reference_of(x, y, **options)
    model, mine = network(True, **options), part(rows, rank)

    def step(x, y):
        with hk.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(example_losses(model, x, y)) * (size / sum(rows))
        return tape.gradient(loss, model.trainable_variables)

    grads = (tf.function(step) if mode == "graph" else step)(tf.constant(x[mine]), tf.constant(y[mine]))
    close(model, reference, grads, expected, 0.02 if options.get("dtype") == "mixed_bfloat16" else 1e-5)


@pytest.mark.parametrize("split", ["even", "empty"])
def test_masked_elements_do_not_count(split, rng, rank, size):
    rows = rows_of(split, size)
    x, _ = data(rng, sum(rows), (4,))
    mask = rng.random((sum(rows), 4)) < 0.6
    if size > 1:
        mask[part(rows, 1)] = False  # a rank with only masked elements
    mine = part(rows, rank)
    results = []
    for synchronized, which in ((False, slice(None)), (True, mine)):
        layer = keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.5)
        inputs = tf.Variable(x[which])
        layer.build(inputs.shape)
        hk.layers.synchronize_batch_normalization(layer)
        with tf.GradientTape() as tape:
            out = layer(inputs, training=True, mask=tf.constant(mask[which]))
            loss = tf.reduce_sum(tf.sin(out))
        results.append((out.numpy(), tape.gradient(loss, inputs).numpy(), [v.numpy() for v in layer.variables]))
    (out, grad, variables), (local_out, local_grad, local_variables) = results
    np.testing.assert_allclose(local_out, out[mine], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(local_grad, grad[mine], rtol=1e-4, atol=1e-5)
    same_values(local_variables, variables, rtol=1e-5, atol=1e-6)


@pairwise(split=["uneven", "empty"], op=[hk.Average, hk.Sum], mode=["eager", "graph"])
def test_a_tapes_weight_equals_one_process(split, op, mode, rng, rank, size):
    """In a graph, TensorFlow must not remove the collectives of a rank whose weight is the constant 0."""
    rows = rows_of(split, size)
    x, y = data(rng, sum(rows))
    reference, expected = reference_of(x, y)
    model, mine = network(True), part(rows, rank)
    weight = rows[rank] / (1 if op == hk.Average else sum(rows))

    def step():
        with hk.DistributedGradientTape(tf.GradientTape(), weight=weight, op=op) as tape:
            loss = tf.reduce_mean(example_losses(model, x[mine], y[mine]))
        return tape.gradient(loss, model.trainable_variables)

    close(model, reference, (tf.function(step) if mode == "graph" else step)(), expected)
    with pytest.raises(ValueError, match=r"weight.*DistributedGradientTape"):
        hk.average_gradients([tf.ones(2)], weight=rows[rank])


def test_layers_that_one_rank_has_freed_change_nothing(rank):
    """Garbage is collected at a different time on each rank."""
    model, variable = network(True), tf.Variable(2.0)
    if rank == 0:
        del model
        gc.collect()
    with hk.DistributedGradientTape(tf.GradientTape(), weight=1) as tape:
        loss = variable**2
    assert float(tape.gradient(loss, variable)) == 4
    if rank > 0:
        del model
    np.testing.assert_array_equal(hk.average_gradients([tf.ones(2)], weight=1)[0], np.ones(2))


def test_a_gradient_of_a_gradient_equals_one_process(rng, rank, size):
    rows = rows_of("even", size)
    x, _ = data(rng, sum(rows))
    mine = part(rows, rank)

    def penalty(model, x):
        x = tf.constant(x)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = tf.reduce_sum(tf.sin(model(x, training=True)))
            slope = inner.gradient(score, x)
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(slope), axis=1))
        return slope, outer.gradient(loss, model.trainable_variables)

    reference, model = network(False), network(True)
    slope, expected = penalty(reference, x)
    local_slope, local = penalty(model, x[mine])
    np.testing.assert_allclose(local_slope, slope[mine], rtol=1e-4, atol=1e-5)
    close(model, reference, hk.average_gradients(local), expected, 1e-4)
    if size > 1:
        with pytest.raises(hk.HvdkitError, match="second-order gradient"), share_of_batch(tf.constant(1.0, tf.float64)):
            penalty(model, x[mine])


def test_the_variance_is_exact_far_from_zero(rng, rank, size):
    """The mean is 10,000 standard deviations from zero, where E[x^2] - E[x]^2 in float32 has no correct digit."""
    x = (1e4 + rng.normal(size=(size * 64, 2))).astype("f4")
    exact = x.astype("f8").var(axis=0)
    layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.0)
    layer.build((None, 2))
    hk.layers.synchronize_batch_normalization(layer)
    layer(x[rank * 64 : (rank + 1) * 64], training=True)
    np.testing.assert_allclose(layer.moving_variance, exact, rtol=1e-5)
    np.testing.assert_allclose(layer.moving_mean, x.astype("f8").mean(axis=0), rtol=1e-6)


def test_a_layer_costs_one_allreduce_per_pass(rng, size):
    x, y = data(rng, 4)
    with counting() as counts:
        model = network(True)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(example_losses(model, x, y))
            return tape.gradient(loss, model.trainable_variables)

        step(x, y)
        counts.look()
        step(x, y)
        found = [(e.kind, e.runs, e.bytes) for e in counts.exchanges()]
        assert found == ([("allreduce", 1, 3 * 8 * CHANNELS)] * 2 if size > 1 else [])
        counts.look()
        hk.layers.average_moving_statistics(network(False))
        assert counts.eager() == (size > 1)
        hk.layers.average_moving_statistics(model)  # synchronized
        assert counts.eager() == 0


@pytest.mark.ranks(2, 3)
def test_moving_statistics_are_averaged_and_equal_ones_keep_their_bits(rank, size):
    model = network(False)
    norm = model.get_layer("norm")
    norm.moving_mean.assign(np.full(CHANNELS, rank, "f4"))
    norm.moving_variance.assign(np.full(CHANNELS, 0.1, "f4"))
    hk.layers.average_moving_statistics(model)
    np.testing.assert_allclose(norm.moving_mean, np.full(CHANNELS, (size - 1) / 2), rtol=1e-6)
    assert np.array_equal(norm.moving_variance, np.full(CHANNELS, 0.1, "f4"))
    hk.layers.average_moving_statistics(None)


def test_a_class_with_its_own_statistics_is_refused():
    class Own(keras.layers.BatchNormalization):
        def _moments(self, inputs, mask):
            return super()._moments(inputs, mask)

    model = keras.Sequential([keras.Input((2,)), Own(synchronized=True)])
    with pytest.raises(ValueError, match=r"synchronized.*_moments"):
        hk.layers.synchronize_batch_normalization(model)


def test_a_synchronized_model_is_saved_and_copied_as_keras_does(tmp_path):
    model = network(True)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "_moments" not in vars(loaded.get_layer("norm")) and loaded.get_layer("norm").synchronized
    assert hk.layers.synchronize_batch_normalization(keras.models.clone_model(model))


# ---- in fit, and around it ------------------------------------------------------------------------------------


def fitted(model, x, y, batch, optimizer, callbacks=()):
    """Return ``model`` after an epoch without shuffling."""
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(x, y, batch_size=batch, shuffle=False, callbacks=list(callbacks), verbose=0)
    return model


def fresh(synchronized):
    """Return a model that has not been synchronized."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(CHANNELS), keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.7)]
    return keras.Sequential([keras.Input((CHANNELS,)), *layers, keras.layers.Dense(2)])


@pytest.mark.parametrize("how", ["function", "callbacks", "supervisor"])
def test_fit_equals_one_process(how, rng, rank, size, shared_path):
    x, y = data(rng, 24 * size)
    reference = fitted(fresh(False), x, y, 4 * size, opts.SGD(0.1, momentum=0.9))
    own = x.reshape(-1, size, 4, CHANNELS)[:, rank].reshape(-1, CHANNELS)  # this rank's rows of each global batch
    target = y.reshape(-1, size, 4, 2)[:, rank].reshape(-1, 2)
    model, optimizer = fresh(True), hk.DistributedOptimizer(opts.SGD(0.1, momentum=0.9))
    callbacks = {
        "callbacks": [hk.callbacks.BroadcastInitial(), hk.callbacks.MetricAverage()],
        "supervisor": [hk.callbacks.SupervisorCallback(shared_path)],
    }
    if how == "function":
        hk.layers.synchronize_batch_normalization(model)
    fitted(model, own, target, 4, optimizer, callbacks.get(how, ()))
    same_values(model.variables, reference.variables, rtol=1e-4, atol=1e-5)
    hk.compare_variables(model.variables)


@pytest.mark.parametrize("where", ["the end of fit", "validation", "the supervisor"])
def test_moving_statistics_are_equal_where_they_are_used(where, rng, rank, size, shared_path):
    x, y = data(rng, 16)
    x, y = x + rank, y
    seen = []

    class Look(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            seen.append([v.numpy() for v in self.model.non_trainable_variables])

        def on_epoch_end(self, epoch, logs=None):
            seen.append([v.numpy() for v in self.model.non_trainable_variables])

    model = fresh(False)
    model.compile(hk.DistributedOptimizer(opts.SGD(0.1)), "mse", jit_compile=False)
    if where == "the supervisor":
        model.optimizer.build(model.trainable_variables)
        with hk.Supervisor(shared_path, model=model, summary_steps=None) as session:
            model.layers[1].moving_mean.assign(np.full(CHANNELS, rank, "f4"))
            session.step()
            session.save()  # different on each rank
            assert model.layers[1].moving_mean.numpy()[0] == rank
    else:
        callbacks = [hk.callbacks.StepLog(4)] if where == "the end of fit" else [hk.callbacks.MetricAverage(), Look()]
        validation = (x[:4], y[:4]) if where == "validation" else None
        model.fit(x, y, batch_size=4, validation_data=validation, callbacks=callbacks, verbose=0)
        assert len(seen) == (2 if where == "validation" else 0)
    for values in [*seen, [v.numpy() for v in model.non_trainable_variables]]:
        for value in values:
            assert len({each.tobytes() for each in hk.allgather_object(value)}) == 1
    if where == "the supervisor":
        np.testing.assert_allclose(model.layers[1].moving_mean, np.full(CHANNELS, (size - 1) / 2), rtol=1e-6)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("how", ["fit", "loop", "tape"])
def test_local_statistics_are_refused(how, rng):
    """The model is not synchronized before its forward pass by any call known to hvdkit."""
    x, y = data(rng, 4)
    model, optimizer = fresh(True), hk.DistributedOptimizer(opts.SGD(0.1), op=None if how == "tape" else hk.Average)

    with raises_on_several(ValueError, r"synchronized.*synchronize_batch_normalization"):
        if how == "fit":
            fitted(model, x, y, 4, optimizer)
        with hk.DistributedGradientTape(tf.GradientTape()) if how == "tape" else tf.GradientTape() as tape:
            loss = tf.reduce_mean(example_losses(model, x, y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    hk.layers.synchronize_batch_normalization(model)


@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("rows", [25, pytest.param(27, marks=pytest.mark.full)])
def test_hk_fit_equals_one_process(rows, rng, size):
    """Global batches of 8 rows; of 27 rows the last batch has 3, of 25 it has 1, so that some ranks have none."""
    x, y = data(rng, rows)
    reference, model = fresh(False), fresh(True)
    for each, fit in ((reference, keras.Model.fit), (model, hk.fit)):
        each.compile(opts.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
        fit(each, x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    same_values(model.weights, reference.weights, rtol=1e-4, atol=1e-5)
    hk.compare_variables(model.weights)
