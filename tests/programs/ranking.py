"""Pairwise ranking: a preferred item against another one, items of both
scored by one tower.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Ranker(keras.Model):
    """Score (query, item) pairs, so that the preferred item scores higher."""

    def __init__(self):
        super().__init__()
        self.queries = layers.Embedding(12, 4)
        self.items = layers.Embedding(30, 4)
        self.tower = keras.Sequential(
            [layers.Dense(8, activation="relu"), layers.Dense(1)]
        )

    def call(self, inputs):
        query = self.queries(inputs["query"])
        return self.tower(
            ops.concatenate([query, self.items(inputs["item"])], axis=-1)
        )

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        other = self({"query": x["query"], "item": x["other"]})
        return ops.mean(ops.softplus(other - y_pred))


keras.utils.set_random_seed(26)
rng = np.random.default_rng(26)
rows = {
    "query": rng.integers(0, 12, 64),
    "item": rng.integers(15, 30, 64),
    "other": rng.integers(0, 15, 64),
}
dataset = tf.data.Dataset.from_tensor_slices(rows).batch(16).cache()

ranker = Ranker()
ranker.compile(optimizer=keras.optimizers.Adagrad(0.1))
history = ranker.fit(dataset, epochs=3, verbose=0)
scores = ranker.predict(dataset, verbose=0)

result = {
    "history": history.history,
    "weights": ranker.get_weights(),
    "scores": scores,
}
