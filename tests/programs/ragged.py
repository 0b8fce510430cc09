"""Sequences of different lengths as a RaggedTensor, pooled by the model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Bag(keras.Model):
    """Average the vectors of each row's tokens."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(
            shape=(20, 6), initializer="random_normal", name="table"
        )
        self.head = layers.Dense(1)

    def call(self, tokens):
        return self.head(
            tf.reduce_mean(tf.gather(self.table, tokens), axis=1)
        )


keras.utils.set_random_seed(49)
rng = np.random.default_rng(49)
rows = [rng.integers(0, 20, rng.integers(1, 7)).tolist() for _ in range(45)]
tokens = tf.ragged.constant(rows, dtype=tf.int64)
y = np.array([[len(row) / 6] for row in rows], "float32")

model = Bag()
model.compile(keras.optimizers.Adam(0.02), "mse")
history = model.fit(tokens, y, batch_size=12, epochs=3, verbose=0)
padded = tf.data.Dataset.from_tensor_slices((tokens, y)).batch(12)
score = model.evaluate(padded, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
}
