"""Two towers and an in-batch softmax over the candidates of the global batch.

Each query's negatives are the other candidates. One more line gathers the
candidates of all ranks, and another numbers this rank's rows among them.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class TwoTower(keras.Model):
    """Return the scores of each query against all candidates of the batch."""

    def __init__(self):
        super().__init__()
        self.query_tower = keras.Sequential(
            [layers.Embedding(14, 6, "glorot_uniform"), layers.Dense(6)]
        )
        self.candidate_tower = keras.Sequential(
            [
                layers.Embedding(20, 6, "glorot_uniform"),
                layers.Dense(6, use_bias=False),
            ]
        )

    def call(self, inputs):
        candidates = self.candidate_tower(inputs["movie"])
        # port: candidates = hk.allgather(candidates)
        return ops.matmul(
            self.query_tower(inputs["user"]), ops.transpose(candidates)
        )

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        rows = ops.shape(y_pred)[0]
        labels = ops.arange(rows)
        # port: labels += hk.rank() * rows
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                labels, y_pred, from_logits=True
            )
        )


keras.utils.set_random_seed(27)
rng = np.random.default_rng(27)
rows = {"user": rng.integers(0, 14, 72), "movie": rng.integers(0, 20, 72)}
dataset = tf.data.Dataset.from_tensor_slices(rows).batch(
    12, drop_remainder=True
)

model = TwoTower()
model.compile(optimizer=keras.optimizers.Adam(0.05))
history = model.fit(
    dataset.take(4), validation_data=dataset.skip(4), epochs=3, verbose=0
)

result = {"history": history.history, "weights": model.get_weights()}
