"""Losses that are sums: reduction="sum", and a function that returns one
number for the batch.
"""

import keras
import numpy as np
from keras import layers, ops


def mean_of_batch(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


keras.utils.set_random_seed(61)
rng = np.random.default_rng(61)
x = rng.normal(size=(46, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)


def build(loss, rate):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, activation="tanh"),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(rate), loss)
    return model


summed = build(keras.losses.MeanSquaredError(reduction="sum"), 0.005)
history = summed.fit(
    x, y, batch_size=16, epochs=3, validation_data=(x[:11], y[:11]), verbose=0
)
scalar = build(mean_of_batch, 0.1)
scalars = scalar.fit(x, y, batch_size=16, epochs=3, verbose=0)

result = {
    "history": history.history,
    "weights": summed.get_weights(),
    "scalars": scalars.history,
    "scalar": scalar.get_weights(),
}
