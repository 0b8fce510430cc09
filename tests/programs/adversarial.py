"""Adversarial regularisation: a gradient with respect to the inputs inside
the training step.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Adversarial(keras.Model):
    """Train on rows and on rows moved along the gradient of their loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            losses = keras.losses.sparse_categorical_crossentropy(
                y, self(x, training=True), from_logits=True
            )
        moved = x + 0.1 * ops.sign(tape.gradient(losses, x))
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred) + 0.5 * self.compute_loss(
                moved, y, self(moved, training=True)
            )
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables),
            self.trainable_variables,
        )
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(x)[0])
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


keras.utils.set_random_seed(63)
rng = np.random.default_rng(63)
x = rng.normal(size=(56, 5)).astype("float32")
y = x[:, :3].argmax(axis=1)

inputs = keras.Input((5,))
model = Adversarial(
    inputs, layers.Dense(3)(layers.Dense(8, activation="tanh")(inputs))
)
model.compile(
    keras.optimizers.SGD(0.1),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(x, y, batch_size=16, epochs=3, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": model.evaluate(x, y, verbose=0),
}
