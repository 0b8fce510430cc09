"""A Python generator of batches, and one of validation batches."""

import keras
import numpy as np
from keras import layers


def batches(x, y, batch_size):
    while True:
        for start in range(0, len(x), batch_size):
            yield x[start : start + batch_size], y[start : start + batch_size]


keras.utils.set_random_seed(57)
rng = np.random.default_rng(57)
x = rng.normal(size=(43, 4)).astype("float32")
y = x[:, 1:2] * x[:, 2:3]

model = keras.Sequential(
    [keras.Input((4,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
)
model.compile(keras.optimizers.Adam(0.02), "mse")
history = model.fit(
    batches(x[:33], y[:33], 9),
    steps_per_epoch=4,
    epochs=3,
    validation_data=batches(x[33:], y[33:], 5),
    validation_steps=2,
    verbose=0,
)
outputs = model.predict(batches(x, y, 9), steps=5, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "outputs": outputs,
}
