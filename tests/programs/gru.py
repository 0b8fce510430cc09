"""Two GRUs, one reading the other's sequence, on masked numbers."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(19)
rng = np.random.default_rng(19)
x = rng.normal(size=(52, 9, 2)).astype("float32")
x[np.arange(9) >= rng.integers(3, 10, 52)[:, None]] = -1.0
y = np.where(x == -1.0, 0, x).sum(axis=(1, 2))[:, None].astype("float32")

inputs = keras.Input((9, 2))
masked = layers.Masking(-1.0)(inputs)
hidden = layers.GRU(6, return_sequences=True)(masked)
outputs = layers.Dense(1)(layers.GRU(5)(hidden))
model = keras.Model(inputs, outputs)
model.compile(
    keras.optimizers.RMSprop(0.01),
    loss=keras.losses.LogCosh(),
    metrics=["mse", keras.metrics.R2Score()],
)
history = model.fit(
    x, y, batch_size=16, epochs=2, validation_data=(x[:20], y[:20]), verbose=0
)

result = {"history": history.history, "weights": model.get_weights()}
