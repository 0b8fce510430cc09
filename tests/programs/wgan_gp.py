"""A Wasserstein GAN with gradient penalty: a gradient of a gradient, several
critic steps per generator step.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class WGAN(keras.Model):
    """Train the critic twice for each step of the generator."""

    def __init__(self, critic, generator, gp_weight=10.0):
        super().__init__()
        self.critic = critic
        self.generator = generator
        self.gp_weight = gp_weight

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer

    def gradient_penalty(self, real, fake, alpha):
        between = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.critic(between, training=True)
        gradients = tape.gradient(scores, between)
        norm = ops.sqrt(ops.sum(ops.square(gradients), axis=1) + 1e-12)
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, data):
        ((real, noise, alpha),) = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                cost = ops.mean(self.critic(fake, training=True)) - ops.mean(
                    self.critic(real, training=True)
                )
                d_loss = cost + self.gp_weight * self.gradient_penalty(
                    real, fake, alpha
                )
            gradients = tape.gradient(d_loss, self.critic.trainable_variables)
            self.d_optimizer.apply_gradients(
                zip(gradients, self.critic.trainable_variables, strict=True)
            )
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(
                self.critic(
                    self.generator(noise, training=True), training=True
                )
            )
        gradients = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(
            zip(gradients, self.generator.trainable_variables, strict=True)
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


keras.utils.set_random_seed(10)
rng = np.random.default_rng(10)
real = rng.normal(1.0, 0.3, size=(40, 4)).astype("float32")
noise = rng.normal(size=(40, 3)).astype("float32")
alpha = rng.random((40, 1)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((real, noise, alpha)).batch(16)

critic = keras.Sequential(
    [keras.Input((4,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
)
generator = keras.Sequential(
    [keras.Input((3,)), layers.Dense(8, activation="tanh"), layers.Dense(4)]
)
wgan = WGAN(critic, generator)
wgan.compile(
    d_optimizer=keras.optimizers.Adam(
        0.002, beta_1=0.5, beta_2=0.9, epsilon=1e-4
    ),
    g_optimizer=keras.optimizers.Adam(
        0.002, beta_1=0.5, beta_2=0.9, epsilon=1e-4
    ),
)
history = wgan.fit(dataset.map(lambda *batch: (batch,)), epochs=3, verbose=0)

result = {
    "history": history.history,
    "critic": critic.get_weights(),
    "generator": generator.get_weights(),
}
