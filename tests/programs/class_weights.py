"""Rare classes weighted up by class_weight, for arrays with validation and
for a dataset.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(37)
rng = np.random.default_rng(37)
x = rng.normal(size=(80, 6)).astype("float32")
y = np.digitize(x[:, 0], [0.5, 1.2])
counts = np.bincount(y)

model = keras.Sequential(
    [
        keras.Input((6,)),
        layers.Dense(8, activation="relu"),
        layers.Dense(3, activation="softmax"),
    ]
)
model.compile(
    "adam",
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
    weighted_metrics=[
        keras.metrics.SparseCategoricalAccuracy(name="weighted_accuracy")
    ],
)
history = model.fit(
    x,
    y,
    batch_size=16,
    epochs=3,
    class_weight={c: len(y) / (3 * n) for c, n in enumerate(counts)},
    validation_split=0.2,
    verbose=0,
)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
again = model.fit(
    dataset, epochs=1, class_weight={0: 0.5, 1: 2.0, 2: 4.0}, verbose=0
)

result = {
    "history": history.history,
    "again": again.history,
    "weights": model.get_weights(),
}
