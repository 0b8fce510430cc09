"""A weight for each row, in training, validation, evaluation and weighted
metrics. A weight for each row, in training, validation, evaluation and
weighted metrics.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(47)
rng = np.random.default_rng(47)
x = rng.normal(size=(63, 4)).astype("float32")
y = (x[:, 0] * 2 > x[:, 1]).astype("float32")
weights = rng.exponential(size=63).astype("float32")
weights[::5] = 0

model = keras.Sequential(
    [
        keras.Input((4,)),
        layers.Dense(6, activation="relu"),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    keras.optimizers.SGD(0.2),
    "binary_crossentropy",
    metrics=["accuracy"],
    weighted_metrics=[
        keras.metrics.BinaryAccuracy(name="weighted"),
        keras.metrics.Recall(),
    ],
)
history = model.fit(
    x[:48],
    y[:48],
    sample_weight=weights[:48],
    batch_size=14,
    epochs=3,
    validation_data=(x[48:], y[48:], weights[48:]),
    verbose=0,
)
score = model.evaluate(x, y, sample_weight=weights, batch_size=20, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
}
