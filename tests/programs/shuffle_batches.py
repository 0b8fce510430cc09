"""fit's own shuffles: shuffle="batch", shuffle=False, and the default of a
second call.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(66)
rng = np.random.default_rng(66)
x = rng.normal(size=(50, 3)).astype("float32")
y = x[:, :1] ** 2

model = keras.Sequential(
    [keras.Input((3,)), layers.Dense(6, activation="relu"), layers.Dense(1)]
)
model.compile(keras.optimizers.SGD(0.05), "mse")
histories = [
    model.fit(
        x, y, batch_size=12, epochs=2, shuffle=shuffle, verbose=0
    ).history
    for shuffle in ("batch", False, True)
]

result = {"histories": histories, "weights": model.get_weights()}
