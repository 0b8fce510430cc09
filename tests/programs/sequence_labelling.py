"""Named entities: one label per token, padding masked in loss and metrics by
mask_zero.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(15)
rng = np.random.default_rng(15)
lengths = rng.integers(2, 11, 54)
tokens = rng.integers(1, 20, (54, 10))
tokens[np.arange(10) >= lengths[:, None]] = 0
tags = np.where(tokens > 0, tokens % 4, 0)

model = keras.Sequential(
    [
        layers.Embedding(20, 8, mask_zero=True),
        layers.Bidirectional(layers.LSTM(6, return_sequences=True)),
        layers.Dense(4, activation="softmax"),
    ]
)
model.compile(
    optimizer=keras.optimizers.SGD(0.5),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    weighted_metrics=[
        keras.metrics.SparseCategoricalCrossentropy(name="cross_entropy")
    ],
)
history = model.fit(
    tokens[:44],
    tags[:44],
    batch_size=12,
    epochs=3,
    validation_data=(tokens[44:], tags[44:]),
    verbose=0,
)
predicted = model.predict(tokens, batch_size=16, verbose=0).argmax(-1)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "predicted": predicted[tokens > 0],
    "score": model.evaluate(tokens, tags, batch_size=16, verbose=0),
}
