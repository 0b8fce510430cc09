"""Contrastive learning: each row's negatives are all others of the global
batch.

The loss couples the rows of a batch, and no share of it can compute it alone:
two more lines gather the keys of all ranks, and number this rank's rows among
them.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Contrastive(keras.Model):
    """Pull two views of a row together, away from all other rows."""

    def __init__(self, encoder, temperature=0.2):
        super().__init__()
        self.encoder = encoder
        self.temperature = temperature
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(
            name="accuracy"
        )

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def train_step(self, data):
        view, other = data
        rows = ops.shape(view)[0]
        with tf.GradientTape() as tape:
            queries = ops.normalize(self.encoder(view), axis=1)
            keys = ops.normalize(self.encoder(other), axis=1)
            # port: keys = hk.allgather(keys)
            labels = ops.arange(rows)
            # port: labels += hk.rank() * rows
            logits = (
                ops.matmul(queries, ops.transpose(keys)) / self.temperature
            )
            loss = ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    labels, logits, from_logits=True
                )
            )
        gradients = tape.gradient(loss, self.encoder.trainable_weights)
        self.optimizer.apply(gradients, self.encoder.trainable_weights)
        self.loss_tracker.update_state(loss, sample_weight=rows)
        self.accuracy.update_state(labels, logits)
        return {
            "loss": self.loss_tracker.result(),
            "accuracy": self.accuracy.result(),
        }


keras.utils.set_random_seed(12)
rng = np.random.default_rng(12)
x = rng.normal(size=(60, 8)).astype("float32")
views = [
    x + 0.1 * rng.normal(size=x.shape).astype("float32") for _ in range(2)
]
dataset = (
    tf.data.Dataset.from_tensor_slices(tuple(views))
    .shuffle(60)
    .batch(12, drop_remainder=True)
)

encoder = keras.Sequential(
    [keras.Input((8,)), layers.Dense(16, activation="tanh"), layers.Dense(6)]
)
model = Contrastive(encoder)
model.compile(optimizer=keras.optimizers.Adam(0.01))
history = model.fit(dataset, epochs=3, verbose=0)

result = {"history": history.history, "weights": encoder.get_weights()}
