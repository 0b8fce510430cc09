"""Averages of the weights: use_ema, which overwrites the weights every few
steps and at the end.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(33)
rng = np.random.default_rng(33)
x = rng.normal(size=(64, 4)).astype("float32")
y = (x @ np.arange(1.0, 5.0, dtype="float32"))[:, None]

model = keras.Sequential(
    [keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(1)]
)
model.compile(
    keras.optimizers.SGD(
        0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=5
    ),
    "mse",
)
history = model.fit(x, y, batch_size=10, epochs=2, verbose=0)

swapped = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
swapped.compile(
    keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.7), "mse"
)
averaged = swapped.fit(
    x,
    y,
    batch_size=16,
    epochs=2,
    validation_data=(x, y),
    callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    verbose=0,
)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "averaged": averaged.history,
    "swapped": swapped.get_weights(),
}
