"""Save a model and its optimizer, load them, continue by initial_epoch."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(43)
rng = np.random.default_rng(43)
x = rng.normal(size=(56, 5)).astype("float32")
y = np.abs(x).sum(axis=1, keepdims=True)

model = keras.Sequential(
    [keras.Input((5,)), layers.Dense(8, activation="relu"), layers.Dense(1)]
)
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
first = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
model.save("model.keras")

loaded = keras.saving.load_model("model.keras")
second = loaded.fit(x, y, batch_size=16, epochs=4, initial_epoch=2, verbose=0)

result = {
    "first": first.history,
    "second": second.history,
    "epochs": second.epoch,
    "weights": loaded.get_weights(),
    "iterations": int(loaded.optimizer.iterations),
    "slots": [
        np.array(v)
        for v in loaded.optimizer.variables
        if "momentum" in v.path
    ],
}
