"""Several outputs as a list, one trained without its own labels, losses by
name and function.
"""

import keras
import numpy as np
from keras import layers, ops


def pinball(quantile):
    def loss(y_true, y_pred):
        error = y_true - y_pred
        return ops.mean(
            ops.maximum(quantile * error, (quantile - 1) * error), axis=-1
        )

    return loss


keras.utils.set_random_seed(64)
rng = np.random.default_rng(64)
x = rng.normal(size=(62, 4)).astype("float32")
y = (x.sum(axis=1, keepdims=True) + rng.normal(size=(62, 1))).astype(
    "float32"
)

inputs = keras.Input((4,))
hidden = layers.Dense(8, activation="relu")(inputs)
model = keras.Model(
    inputs,
    [
        layers.Dense(1, name=name)(hidden)
        for name in ("low", "middle", "high")
    ],
)
model.compile(
    keras.optimizers.SGD(0.1),
    loss=[pinball(0.1), "mae", pinball(0.9)],
    metrics=[None, ["mse"], None],
)
history = model.fit(
    x, [y, y, y], batch_size=16, epochs=3, validation_split=0.2, verbose=0
)
low, middle, high = model.predict(x, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "low": low,
    "middle": middle,
    "high": high,
}
