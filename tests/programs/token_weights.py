"""Labels of shape (rows, time) with a weight per token instead of a mask."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(16)
rng = np.random.default_rng(16)
x = rng.normal(size=(50, 7, 3)).astype("float32")
y = rng.integers(0, 3, (50, 7))
weights = (rng.random((50, 7)) < 0.7).astype("float32")
train = tf.data.Dataset.from_tensor_slices(
    (x[:40], y[:40], weights[:40])
).batch(12)
test = tf.data.Dataset.from_tensor_slices(
    (x[40:], y[40:], weights[40:])
).batch(12)

inputs = keras.Input((None, 3))
hidden = layers.Conv1D(6, 3, padding="same", activation="relu")(inputs)
model = keras.Model(inputs, layers.Dense(3)(hidden))
model.compile(
    optimizer=keras.optimizers.Adagrad(0.1),
    loss=keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    ),
    metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
    weighted_metrics=[
        keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    ],
)
history = model.fit(train, epochs=3, validation_data=test, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": model.evaluate(test, verbose=0),
}
