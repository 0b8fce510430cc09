"""Sentiment of padded token sequences by an LSTM."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(18)
rng = np.random.default_rng(18)
reviews = [
    rng.integers(1, 30, rng.integers(3, 15)).tolist() for _ in range(60)
]
labels = np.array([sum(review) % 2 for review in reviews])
x = keras.utils.pad_sequences(reviews, maxlen=12)

model = keras.Sequential(
    [
        keras.Input((None,), dtype="int32"),
        layers.Embedding(30, 8),
        layers.LSTM(8),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"]
)
history = model.fit(
    x, labels, batch_size=16, epochs=2, validation_split=0.2, verbose=0
)
score = model.evaluate(x, labels, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
}
