"""Dropout and augmentation: each rank draws its own masks, so that N ranks
come close to one process.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(59)
rng = np.random.default_rng(59)
x = rng.random((96, 6, 6, 1)).astype("float32")
y = 4 * x.mean(axis=(1, 2))

model = keras.Sequential(
    [
        keras.Input((6, 6, 1)),
        layers.RandomFlip("horizontal"),
        layers.GaussianNoise(0.05),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dropout(0.1),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.SGD(0.002), "mse")
history = model.fit(
    x, y, batch_size=24, epochs=4, validation_data=(x, y), verbose=0
)

result = {"history": history.history, "weights": model.get_weights()}
