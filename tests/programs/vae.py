"""A variational autoencoder: KL divergence and reconstruction in its own
train_step, noise from a SeedGenerator.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Sampling(layers.Layer):
    """Draw z from the encoder's normal distribution."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        epsilon = keras.random.normal(
            ops.shape(z_mean), seed=self.seed_generator
        )
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class VAE(keras.Model):
    """Encode, sample, decode."""

    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(
            name="reconstruction_loss"
        )
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [
            self.total_loss_tracker,
            self.reconstruction_loss_tracker,
            self.kl_loss_tracker,
        ]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(
                ops.sum(
                    keras.losses.binary_crossentropy(data, reconstruction),
                    axis=(1, 2),
                )
            )
            kl_loss = -0.5 * (
                1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var)
            )
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(grads, self.trainable_weights, strict=True)
        )
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {m.name: m.result() for m in self.metrics}


keras.utils.set_random_seed(9)
rng = np.random.default_rng(9)
images = (
    rng.random((64, 8, 8, 1)) < np.linspace(0.1, 0.9, 8)[:, None, None]
).astype("float32")

inputs = keras.Input((8, 8, 1))
hidden = layers.Dense(16, activation="relu")(layers.Flatten()(inputs))
z_mean = layers.Dense(2, name="z_mean")(hidden)
z_log_var = layers.Dense(2, name="z_log_var")(hidden)
encoder = keras.Model(
    inputs,
    [z_mean, z_log_var, Sampling()([z_mean, z_log_var])],
    name="encoder",
)
decoder = keras.Sequential(
    [
        keras.Input((2,)),
        layers.Dense(16, activation="relu"),
        layers.Dense(64, activation="sigmoid"),
        layers.Reshape((8, 8, 1)),
    ]
)
vae = VAE(encoder, decoder)
vae.compile(optimizer=keras.optimizers.Adam(0.002))
history = vae.fit(images, epochs=4, batch_size=16, verbose=0)

result = {"history": history.history, "weights": vae.get_weights()}
