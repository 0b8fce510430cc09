"""run_eagerly: a train_step that looks at values as it goes."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Eager(keras.Model):
    """Take the gradients through NumPy."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = [
            g.numpy() for g in tape.gradient(loss, self.trainable_variables)
        ]
        self.optimizer.apply(
            [tf.constant(g) for g in gradients], self.trainable_variables
        )
        return {"batch_loss": loss}


keras.utils.set_random_seed(55)
rng = np.random.default_rng(55)
x = rng.normal(size=(30, 3)).astype("float32")
y = x.sum(axis=1, keepdims=True)

inputs = keras.Input((3,))
model = Eager(inputs, layers.Dense(1)(inputs))
model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
history = model.fit(x, y, batch_size=12, epochs=2, verbose=0)

plain = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
plain.compile(
    keras.optimizers.SGD(0.1), "mse", run_eagerly=True, metrics=["mae"]
)
scored = plain.fit(
    x, y, batch_size=12, epochs=2, validation_split=0.2, verbose=0
)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "scored": scored.history,
    "plain": plain.get_weights(),
}
