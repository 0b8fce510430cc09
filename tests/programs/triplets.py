"""Metric learning with triplets: a train_step on a model of three inputs."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Siamese(keras.Model):
    """Embed anchor, positive and negative by one network."""

    def __init__(self, network, margin=2.0):
        super().__init__()
        self.network = network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        anchor, positive, negative = (self.network(x) for x in inputs)
        return ops.sum(ops.square(anchor - positive), -1), ops.sum(
            ops.square(anchor - negative), -1
        )

    def loss_of(self, data):
        ap_distance, an_distance = self(data)
        return ops.mean(
            ops.maximum(ap_distance - an_distance + self.margin, 0.0)
        )

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.network.trainable_weights, strict=True)
        )
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.loss_of(data))
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


keras.utils.set_random_seed(14)
rng = np.random.default_rng(14)
anchors = rng.normal(size=(64, 6)).astype("float32")
positives = anchors + 0.2 * rng.normal(size=anchors.shape).astype("float32")
negatives = rng.normal(size=anchors.shape).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(
    (anchors, positives, negatives)
).batch(16)

network = keras.Sequential(
    [
        keras.Input((6,)),
        layers.Dense(8, activation="tanh"),
        layers.Dense(3, use_bias=False),
    ]
)
model = Siamese(network)
model.compile(optimizer=keras.optimizers.Adam(0.01))
history = model.fit(
    dataset.take(3), epochs=3, validation_data=dataset.skip(3), verbose=0
)

result = {"history": history.history, "weights": network.get_weights()}
