"""Functions with collectives that TensorFlow differentiates or runs a second time: nested ones, and recomputed ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit as hk

pytestmark = pytest.mark.ranks(2, 3)


@pytest.mark.core
def test_the_gradient_of_a_function_on_a_chief_that_has_created_more(rank, size):
    """TensorFlow numbers the backward passes of functions by everything that the process has created."""
    if rank == 0:
        tf.function(lambda x: x + 1)(1.0)
    squared = tf.function(lambda x: hk.allreduce(x, hk.Sum) ** 2)
    x = tf.Variable(1.0 + rank)

    def gradient():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                y = squared(x)
            slope = tape.gradient(y, x)  # each rank's loss is y = s^2, s the sum over ranks: size * 2s
        return slope, outer.gradient(slope, x)

    for run in (gradient, tf.function(gradient)):
        slope, curvature = run()
        assert (float(slope), float(curvature)) == (size * size * (size + 1), 2 * size * size)


def test_a_function_traced_once_more_in_another_on_one_rank(rank, size):
    """Its collectives have the names that they have on ranks that use the first trace again."""
    inner = tf.function(lambda x: hk.allreduce(tf.reduce_sum(x), hk.Sum))

    @tf.function
    def outer(fixed, rows):
        return inner(fixed) + hk.allreduce(tf.constant(1.0)) + inner(rows)

    rows = 3 + (rank == size - 1)
    assert float(outer(tf.ones([3]), tf.ones([rows]))) == 3 * size + 1 + 3 * size + 1


def test_the_gradients_of_one_function_called_twice_at_once(rank, size):
    """Both backward passes run the same nodes, and neither needs the other's result."""
    inner = tf.function(lambda x: hk.allreduce(x, hk.Sum) ** 2)

    @tf.function
    def step(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            y = inner(a) + inner(b)
        return tape.gradient(y, [a, b])

    for _ in range(10):
        one, ten = step(tf.constant(1.0), tf.constant(10.0 * rank))
        assert (float(one), float(ten)) == (2 * size**2, 20 * size * sum(range(size)))


def test_recomputed_functions_equal_those_that_are_not(rank, size):
    w, v = tf.Variable([1.0, 2.0, 3.0]), tf.Variable([0.5, 1.0, 1.5])
    x = tf.reshape(tf.range(12.0), [4, 3]) / 10 + rank

    def block(of):
        return lambda x: tf.sin(x * of) * tf.reduce_mean(hk.allreduce(tf.reduce_mean(x * of, 0)))

    def gradient(first, second):
        with hk.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(second(first(x)) ** 2)
        return tape.gradient(loss, [w, v])

    expected = gradient(block(w), block(v))
    recompute = tf.recompute_grad
    cases = {
        "recomputed": (recompute(block(w)), recompute(block(v))),
        "functions": (recompute(tf.function(block(w))), recompute(tf.function(block(v)))),
        "in functions": (tf.function(recompute(block(w))), tf.function(recompute(block(v)))),
        "nested": (recompute(lambda x: recompute(block(w))(x)), block(v)),
    }
    for name, (first, second) in cases.items():
        for mode in ("eager", "graph"):
            if (name, mode) == ("functions", "eager"):
                continue  # TensorFlow, without hvdkit, gives no gradient of the variables of a recomputed tf.function
            run = tf.function(gradient) if mode == "graph" else gradient
            for _ in range(2):
                got = run(first, second)
                np.testing.assert_allclose(np.stack(got), np.stack(expected), rtol=1e-5, err_msg=f"{name}, {mode}")


class Recomputed(keras.layers.Layer):
    """Layers whose activations are computed again in the backward pass."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
            shape = part.compute_output_shape(shape)

    def compute_output_shape(self, shape):
        for part in self.parts:
            shape = part.compute_output_shape(shape)
        return shape

    def call(self, x):
        return keras.remat(self.run)(x)

    def run(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.nightly(3)
def test_rematerialized_layers_in_hk_fit_equal_one_process(rng):
    """Compared with Keras's fit of the same layers, because in a graph keras.remat has other gradients than without."""
    x, y = rng.normal(size=(22, 3)).astype("f4"), rng.normal(size=(22, 1)).astype("f4")
    glorot = keras.initializers.GlorotUniform

    def compiled(synchronized):
        dense = keras.layers.Dense(6, "tanh", kernel_initializer=glorot(seed=1))
        norm = keras.layers.BatchNormalization(synchronized=synchronized)
        last = keras.layers.Dense(1, kernel_initializer=glorot(seed=2))
        model = keras.Sequential([keras.Input((3,)), Recomputed(dense, norm), last])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    for batch_size in (6, 7):  # neither divides the rows; 7 doesn't divide among the ranks
        options = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
        reference, model = compiled(False), compiled(True)
        expected = reference.fit(x, y, **options).history["loss"]
        np.testing.assert_allclose(hk.fit(model, x, y, **options).history["loss"], expected, rtol=1e-4)
        for one, other in zip(model.variables, reference.variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-3, atol=1e-5, err_msg=one.path)
