"""Steps that move the weights by a first gradient and take a second one there, as SAM does (arXiv:2010.01412)."""

import keras
import numpy as np
import tensorflow as tf
from helpers.as_one import raises_on_several

import hvdkit as hk


class SharpnessAware(keras.Model):
    """The recipe of docs/pitfalls.md."""

    average = staticmethod(hk.average_gradients)

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        first = self.average(tape.gradient(loss, variables))
        norm = tf.linalg.global_norm(first)
        moves = [0.05 * grad / (norm + 1e-12) for grad in first]
        for variable, move in zip(variables, moves, strict=True):
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        second = tape.gradient(loss, variables)
        for variable, move in zip(variables, moves, strict=True):
            variable.assign_sub(move)
        self.optimizer.apply_gradients(zip(second, variables, strict=True))
        return {"loss": loss}


def test_two_gradients_equal_one_process(rng):
    x, y = rng.normal(size=(22, 4)).astype("f4"), rng.normal(size=(22, 1)).astype("f4")

    def compiled():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = SharpnessAware(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    for batch_size in (6, 7):  # neither divides the rows; 7 doesn't divide among the ranks
        options = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
        reference, model = compiled(), compiled()
        reference.fit(x, y, **options)  # on the whole batch on each rank
        hk.fit(model, x, y, **options)
        for one, other in zip(model.trainable_variables, reference.trainable_variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-6, err_msg=one.path)


class Published(SharpnessAware):
    """The step as it is written for one process."""

    average = staticmethod(lambda grads: grads)


def test_a_step_with_a_gradient_of_its_own_rows_gets_the_remedy(rng):
    x, y = rng.normal(size=(22, 4)).astype("f4"), rng.normal(size=(22, 1)).astype("f4")
    inputs = keras.Input((4,))
    model = Published(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    words = r"after the first update: .*, as SAM does, average that with hk\.average_gradients first; see .*as-in-sam"
    with raises_on_several(hk.CollectiveMismatchError, words):
        hk.fit(model, x, y, batch_size=6, verbose=0)
