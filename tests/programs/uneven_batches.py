"""Batches that ranks cannot divide evenly, and a last batch of one row."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(56)
rng = np.random.default_rng(56)
x = rng.normal(size=(36, 4)).astype("float32")
y = rng.normal(size=(36, 3)).astype("float32")

model = keras.Sequential(
    [keras.Input((4,)), layers.Dense(6, activation="relu"), layers.Dense(3)]
)
model.compile(
    keras.optimizers.Adam(0.02),
    "mse",
    metrics=["mae", keras.metrics.R2Score()],
)
history = model.fit(
    x,
    y,
    batch_size=7,
    epochs=3,
    validation_data=(x[:15], y[:15]),
    validation_batch_size=7,
    verbose=0,
)
score = model.evaluate(x[:5], y[:5], batch_size=4, verbose=0)
outputs = model.predict(x, batch_size=5, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
    "outputs": outputs,
}
