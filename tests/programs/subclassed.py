"""A subclassed model with custom layers, on a shuffled tf.data.Dataset."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Gated(layers.Layer):
    """One dense layer that gates another."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.value = layers.Dense(units)
        self.gate = layers.Dense(units, activation="sigmoid")

    def call(self, inputs):
        return self.value(inputs) * self.gate(inputs)


class Classifier(keras.Model):
    """Two gated layers and logits."""

    def __init__(self):
        super().__init__()
        self.blocks = [Gated(12), Gated(12)]
        self.head = layers.Dense(4)

    def call(self, inputs, training=False):
        for block in self.blocks:
            inputs = ops.relu(block(inputs))
        return self.head(inputs)


keras.utils.set_random_seed(3)
rng = np.random.default_rng(3)
x = rng.normal(size=(80, 10)).astype("float32")
y = rng.integers(0, 4, 80)
train = (
    tf.data.Dataset.from_tensor_slices((x[:64], y[:64]))
    .shuffle(64)
    .batch(16)
    .prefetch(2)
)
test = tf.data.Dataset.from_tensor_slices((x[64:], y[64:])).batch(16)

model = Classifier()
model.compile(
    optimizer=keras.optimizers.Adam(0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
)
history = model.fit(train, epochs=3, validation_data=test, verbose=0)
logits = model.predict(test, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "logits": logits,
}
