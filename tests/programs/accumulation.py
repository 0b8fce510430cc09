"""gradient_accumulation_steps: one update per three batches; an epoch's last
batch counts toward the next epoch.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(36)
rng = np.random.default_rng(36)
x = rng.normal(size=(64, 5)).astype("float32")
y = (x[:, :1] * x[:, 1:2]).astype("float32")

model = keras.Sequential(
    [keras.Input((5,)), layers.Dense(10, activation="relu"), layers.Dense(1)]
)
model.compile(
    keras.optimizers.Adam(0.02, gradient_accumulation_steps=3), "mse"
)
history = model.fit(x, y, batch_size=8, epochs=3, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "iterations": int(model.optimizer.iterations),
}
