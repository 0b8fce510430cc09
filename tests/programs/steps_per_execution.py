"""steps_per_execution: several steps in one call of the compiled function,
the last call with fewer.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(54)
rng = np.random.default_rng(54)
x = rng.normal(size=(76, 4)).astype("float32")
y = (x**2).sum(axis=1, keepdims=True)

model = keras.Sequential(
    [keras.Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(1)]
)
model.compile(
    keras.optimizers.Adam(0.02), "mse", metrics=["mae"], steps_per_execution=3
)
history = model.fit(x, y, batch_size=16, epochs=3, verbose=0)
score = model.evaluate(x, y, batch_size=16, verbose=0)
outputs = model.predict(x, batch_size=16, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
    "outputs": outputs,
}
