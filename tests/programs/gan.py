"""A GAN: two networks, two optimizers, one train_step. The latent noise is
part of the dataset.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class GAN(keras.Model):
    """Alternate one step of the discriminator with one of the generator."""

    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def train_step(self, data):
        real, noise = data
        batch_size = ops.shape(real)[0]
        labels = ops.concatenate(
            [ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0
        )
        with tf.GradientTape() as tape:
            both = ops.concatenate([self.generator(noise), real], axis=0)
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)

        misleading = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(
                misleading, self.discriminator(self.generator(noise))
            )
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)

        self.d_loss_tracker.update_state(d_loss, sample_weight=batch_size)
        self.g_loss_tracker.update_state(g_loss, sample_weight=batch_size)
        return {
            "d_loss": self.d_loss_tracker.result(),
            "g_loss": self.g_loss_tracker.result(),
        }


keras.utils.set_random_seed(8)
rng = np.random.default_rng(8)
real = rng.normal(2.0, 0.5, size=(52, 6)).astype("float32")
noise = rng.normal(size=(52, 4)).astype("float32")
dataset = (
    tf.data.Dataset.from_tensor_slices((real, noise)).shuffle(52).batch(16)
)

discriminator = keras.Sequential(
    [
        keras.Input((6,)),
        layers.Dense(8),
        layers.LeakyReLU(0.2),
        layers.Dense(1),
    ]
)
generator = keras.Sequential(
    [
        keras.Input((4,)),
        layers.Dense(8),
        layers.LeakyReLU(0.2),
        layers.Dense(6),
    ]
)
gan = GAN(discriminator, generator)
gan.compile(
    d_optimizer=keras.optimizers.Adam(0.01),
    g_optimizer=keras.optimizers.Adam(0.005, beta_1=0.5),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
history = gan.fit(dataset, epochs=3, verbose=0)

result = {
    "history": history.history,
    "discriminator": discriminator.get_weights(),
    "generator": generator.get_weights(),
    "samples": generator.predict(noise[:5], verbose=0),
}
