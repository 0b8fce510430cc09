"""Collaborative filtering: embeddings of users and movies, their product as
the rating.
"""

import keras
import numpy as np
from keras import layers, ops


class RecommenderNet(keras.Model):
    """Multiply the user's vector with the movie's."""

    def __init__(self, num_users, num_movies, size, **kwargs):
        super().__init__(**kwargs)
        options = {
            "embeddings_initializer": "he_normal",
            "embeddings_regularizer": keras.regularizers.l2(1e-4),
        }
        self.user_embedding = layers.Embedding(num_users, size, **options)
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(num_movies, size, **options)
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user, movie = inputs[:, 0], inputs[:, 1]
        product = ops.sum(
            self.user_embedding(user) * self.movie_embedding(movie),
            axis=1,
            keepdims=True,
        )
        return ops.sigmoid(
            product + self.user_bias(user) + self.movie_bias(movie)
        )


keras.utils.set_random_seed(25)
rng = np.random.default_rng(25)
pairs = np.stack([rng.integers(0, 20, 90), rng.integers(0, 15, 90)], axis=1)
ratings = rng.random(90).astype("float32")

model = RecommenderNet(20, 15, 4)
model.compile(
    loss=keras.losses.BinaryCrossentropy(),
    optimizer=keras.optimizers.Adam(learning_rate=0.01),
)
history = model.fit(
    x=pairs[:70],
    y=ratings[:70],
    batch_size=16,
    epochs=3,
    verbose=0,
    validation_data=(pairs[70:], ratings[70:]),
)
scores = model.predict(pairs[:11], verbose=0).flatten()

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "scores": scores,
}
