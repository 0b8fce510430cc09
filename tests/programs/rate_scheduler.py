"""LearningRateScheduler, a rate that History records, and TerminateOnNaN."""

import keras
import numpy as np
from keras import layers


def scheduler(epoch, lr):
    return lr if epoch < 2 else lr * 0.5


keras.utils.set_random_seed(41)
rng = np.random.default_rng(41)
x = rng.normal(size=(48, 4)).astype("float32")
y = rng.normal(size=(48, 1)).astype("float32")

model = keras.Sequential(
    [keras.Input((4,)), layers.Dense(5, activation="elu"), layers.Dense(1)]
)
model.compile(keras.optimizers.SGD(0.2), "mse")
callbacks = [
    keras.callbacks.LearningRateScheduler(scheduler),
    keras.callbacks.TerminateOnNaN(),
]
history = model.fit(
    x, y, batch_size=20, epochs=4, callbacks=callbacks, verbose=0
)

diverging = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
diverging.compile(keras.optimizers.SGD(1e20), "mse")
stopped = diverging.fit(
    x,
    y,
    batch_size=16,
    epochs=9,
    callbacks=[keras.callbacks.TerminateOnNaN()],
    verbose=0,
)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "rate": float(model.optimizer.learning_rate),
    "stopped": stopped.epoch,
}
