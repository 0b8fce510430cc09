"""A model with a custom train_step that uses the compiled loss, metrics and
optimizer.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class CustomModel(keras.Model):
    """Train as Keras does, written out."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


keras.utils.set_random_seed(4)
rng = np.random.default_rng(4)
x = rng.normal(size=(96, 5)).astype("float32")
y = (x @ rng.normal(size=(5, 1))).astype("float32")

inputs = keras.Input((5,))
outputs = layers.Dense(1)(layers.Dense(8, activation="relu")(inputs))
model = CustomModel(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
    loss="mse",
    metrics=["mae"],
)
history = model.fit(x, y, batch_size=24, epochs=3, verbose=0)

result = {"history": history.history, "weights": model.get_weights()}
