"""LambdaCallback: one that sets a variable of the loss for each epoch, and
one that takes notes.
"""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(52)
rng = np.random.default_rng(52)
x = rng.normal(size=(42, 4)).astype("float32")
y = x[:, :1] - x[:, 1:2]

weight = keras.Variable(0.0, trainable=False, name="penalty")


def loss(y_true, y_pred):
    return ops.square(y_true - y_pred) + weight * ops.abs(y_pred)


seen = []
model = keras.Sequential(
    [
        keras.Input((4,)),
        layers.Dense(5, activation="softsign"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adadelta(1.0), loss)
callbacks = [
    keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: weight.assign(0.1 * epoch)
    ),
    keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append((epoch, logs["loss"]))
    ),
]
history = model.fit(
    x, y, batch_size=16, epochs=3, callbacks=callbacks, verbose=0
)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "seen": seen,
}
