"""A model with its own train_step."""

from __future__ import annotations

import keras
import tensorflow as tf


class OwnStep(keras.Model):
    """A model with its own train_step, which hvdkit tests in the first step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}
