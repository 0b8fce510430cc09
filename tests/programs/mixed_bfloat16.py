"""Mixed precision with bfloat16, set for the layers of one model by their
dtype.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(35)
rng = np.random.default_rng(35)
x = rng.normal(size=(60, 6)).astype("float32")
y = np.tanh(x.sum(axis=1, keepdims=True)).astype("float32")

policy = keras.DTypePolicy("mixed_bfloat16")
model = keras.Sequential(
    [
        keras.Input((6,)),
        layers.Dense(16, activation="tanh", dtype=policy),
        layers.Dense(1, dtype="float32"),
    ]
)
model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
history = model.fit(
    x, y, batch_size=20, epochs=3, validation_split=0.1, verbose=0
)

result = {"history": history.history, "weights": model.get_weights()}
