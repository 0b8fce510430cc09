"""A custom callback: it reads the logs of each batch, predicts after each
epoch, and stops training.
"""

import keras
import numpy as np
from keras import layers


class Watch(keras.callbacks.Callback):
    """Record batches' losses, a prediction per epoch; stop below a loss."""

    def __init__(self, probe, target):
        super().__init__()
        self.probe, self.target = probe, target
        self.losses, self.predictions = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.predictions.append(self.model.predict(self.probe, verbose=0))
        if logs["val_loss"] < self.target:
            self.model.stop_training = True


class HalveRate(keras.callbacks.Callback):
    """Halve the learning rate after each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = (
            self.model.optimizer.learning_rate * 0.5
        )


keras.utils.set_random_seed(51)
rng = np.random.default_rng(51)
x = rng.normal(size=(50, 3)).astype("float32")
y = x @ np.array([[2.0], [1.0], [-1.0]], "float32")

model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.2), "mse", metrics=["mae"])
watch = Watch(x[:7], target=0.5)
history = model.fit(
    x[:40],
    y[:40],
    batch_size=16,
    epochs=10,
    validation_data=(x[40:], y[40:]),
    callbacks=[watch, HalveRate()],
    verbose=0,
)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "losses": watch.losses,
    "predictions": watch.predictions,
    "rate": float(model.optimizer.learning_rate),
}
