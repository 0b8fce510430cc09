"""hk.gather_rows: the rows of all ranks, with the gradient of the own ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import line, plain, ported, same_logs, same_weights

import hvdkit as hk


@pytest.mark.core
@pytest.mark.ranks(2, 3)
def test_values_and_gradients_are_those_of_the_own_rows(rank, size):
    counts = [(number + 1) % 3 for number in range(size)]  # one rank of three has none
    whole = np.arange(4.0 * sum(counts), dtype="float32").reshape(-1, 4)
    start = sum(counts[:rank])
    own = tf.constant(whole[start : start + counts[rank]])
    for function in (lambda call: call, tf.function):

        def loss_and_gradient(own):
            with tf.GradientTape() as tape:
                tape.watch(own)
                rows = hk.gather_rows(own)
                loss = tf.reduce_sum(rows) * tf.reduce_sum(rows**2)
            return rows, tape.gradient(loss, own)

        rows, gradient = function(loss_and_gradient)(own)
        np.testing.assert_array_equal(rows, whole)
        expected = np.square(whole).sum() + whole.sum() * 2 * own.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    assert hk.gather_rows(np.full(2, rank)).tolist() == [number for number in range(size) for _ in range(2)]
    assert hk.gather_rows(tf.constant([rank > 0])).numpy().tolist() == [number > 0 for number in range(size)]


@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
def test_a_step_of_ones_own_has_the_loss_of_the_global_batch():
    class Decorrelated(keras.Model):
        gather = staticmethod(hk.gather_rows)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                rows = self.gather(self(x, training=True))
                labels = self.gather(y)
                covariance = tf.matmul(rows - tf.reduce_mean(rows, 0), rows, transpose_a=True)
                loss = tf.reduce_sum(tf.abs(covariance)) / 100 + keras.ops.max(tf.square(rows - labels))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def train(fit):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = Decorrelated(inputs, keras.layers.Dense(2)(keras.layers.Dense(8, "tanh")(inputs)))
        model.compile(keras.optimizers.SGD(0.05))
        generator = np.random.default_rng(0)
        x = generator.normal(size=(22, 4)).astype("float32")
        y = generator.normal(size=(22, 2)).astype("float32")
        history = fit(model, x, y, batch_size=7, epochs=2, shuffle=False, verbose=0)  # 7, 7, 7 and 1 rows
        return model.get_weights(), history.history

    weights, _ = train(hk.fit)
    Decorrelated.gather = staticmethod(lambda rows: rows)
    expected, _ = train(lambda model, *args, **options: model.fit(*args, **options))
    for value, right in zip(weights, expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-6)


class Interacting(keras.layers.Layer):
    """Attends to all rows of the batch, and subtracts its first row, before the loss of each row."""

    def __init__(self, gather):
        super().__init__()
        self.gather = gather

    def call(self, x):
        rows = self.gather(x)
        weights = keras.ops.softmax(keras.ops.matmul(x, keras.ops.transpose(rows)))
        return keras.ops.matmul(weights, rows) - tf.gather(self.gather(x), [0])


@pytest.mark.core(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_layer_before_the_loss_of_each_row_has_the_gradient_of_one_process(rng, policy):
    """Each rank has the losses of its own rows only, which depend on the rows of others; 7, 7, 7 and 1 rows."""

    def build(gather):
        layers = [keras.layers.Dense(4, "tanh"), Interacting(gather), keras.layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    data = line(rng)
    keras.config.set_dtype_policy(policy)
    try:
        one, expected = plain(lambda: build(lambda rows: rows), *data, batch_size=7, epochs=2)
        many, found = ported(lambda: build(hk.gather_rows), *data, batch_size=7, epochs=2)
    finally:
        keras.config.set_dtype_policy("float32")
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if policy == "mixed_bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
    same_logs(found, expected, **tolerance)
    same_weights(many, one, **tolerance)


def test_the_gradient_of_selected_rows(size):
    own = tf.ones([2, 3])
    with tf.GradientTape() as tape:
        tape.watch(own)
        loss = tf.reduce_sum(tf.gather(hk.gather_rows(own), tf.range(2 * size)) ** 2)
    np.testing.assert_array_equal(tape.gradient(loss, own), 2 * own)


def test_what_has_no_rows_or_no_numbers_is_refused():
    with pytest.raises(TypeError, match="expected a dense tensor"):
        hk.gather_rows(tf.ragged.constant([[1], [2, 3]]))
    with pytest.raises((TypeError, hk.CollectiveMismatchError), match=r"string|numbers"):
        hk.gather_rows(tf.constant(["a"]))
