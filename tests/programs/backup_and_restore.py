"""BackupAndRestore: training fails in its third epoch, and a new model
continues from that epoch.
"""

import keras
import numpy as np
from keras import layers


class Interrupt(keras.callbacks.Callback):
    """Fail at the start of one epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError("out of luck")


def build():
    keras.utils.set_random_seed(40)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(6, activation="relu"),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


rng = np.random.default_rng(40)
x = rng.normal(size=(50, 3)).astype("float32")
y = x.prod(axis=1, keepdims=True)

model = build()
try:
    model.fit(
        x,
        y,
        16,
        5,
        callbacks=[keras.callbacks.BackupAndRestore("backup"), Interrupt()],
        verbose=0,
    )
    interrupted = False
except RuntimeError:
    interrupted = True
model = build()
model.set_weights(
    [w + 1 for w in model.get_weights()]
)  # restored, or visible in the losses
backup = keras.callbacks.BackupAndRestore("backup")
history = model.fit(
    x, y, batch_size=16, epochs=5, callbacks=[backup], verbose=0
)

result = {
    "interrupted": interrupted,
    "epochs": history.epoch,
    "history": history.history,
    "weights": model.get_weights(),
}
