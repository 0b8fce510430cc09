"""A denoising model whose train_step draws noise and times from Keras's
global generator.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Denoiser(keras.Model):
    """Predict the noise that was added to a row."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def train_step(self, rows):
        noises = keras.random.normal(ops.shape(rows))
        angles = keras.random.uniform((ops.shape(rows)[0], 1), 0.1, 1.4)
        mixed = ops.cos(angles) * rows + ops.sin(angles) * noises
        with tf.GradientTape() as tape:
            predicted = self.network(
                ops.concatenate([mixed, angles], axis=1), training=True
            )
            noise_loss = ops.mean(ops.square(noises - predicted))
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.network.trainable_weights, strict=True)
        )
        self.noise_loss_tracker.update_state(noise_loss)
        return {m.name: m.result() for m in self.metrics}


keras.utils.set_random_seed(67)
rng = np.random.default_rng(67)
rows = rng.normal(size=(160, 8)).astype("float32")

network = keras.Sequential(
    [keras.Input((9,)), layers.Dense(16, activation="swish"), layers.Dense(8)]
)
model = Denoiser(network)
model.compile(optimizer=keras.optimizers.SGD(0.02))
history = model.fit(rows, epochs=3, batch_size=80, verbose=0)

result = {"history": history.history, "weights": network.get_weights()}
