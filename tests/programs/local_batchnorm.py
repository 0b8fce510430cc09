"""Unsynchronized BatchNormalization: each rank normalizes by its own rows, so
N ranks only come close.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(31)
rng = np.random.default_rng(31)
x = rng.normal(1.0, 2.0, size=(96, 5)).astype("float32")
y = x.sum(axis=1, keepdims=True).astype("float32")

model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(8, use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.SGD(0.002), "mse")
history = model.fit(x, y, batch_size=48, epochs=3, verbose=0)
score = model.evaluate(x, y, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
}
