"""A train_step that returns plain tensors, not metrics: fit's History holds
those of each epoch's last batch.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Logged(keras.Model):
    """Return the batch's loss and the largest share of it, as tensors."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = ops.square(self(x, training=True) - y)
            loss = ops.mean(losses)
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables),
            self.trainable_variables,
        )
        return {"batch_loss": loss, "absolute": ops.mean(ops.sqrt(losses))}


keras.utils.set_random_seed(6)
rng = np.random.default_rng(6)
x = rng.normal(size=(44, 3)).astype("float32")
y = x @ np.array([[1.0], [-2.0], [0.5]], "float32")

inputs = keras.Input((3,))
model = Logged(inputs, layers.Dense(1)(inputs))
model.compile(optimizer=keras.optimizers.SGD(0.1))
history = model.fit(x, y, batch_size=16, epochs=3, verbose=0)

result = {"history": history.history, "weights": model.get_weights()}
