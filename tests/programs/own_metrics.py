"""A train_step and a test_step that use their own loss and trackers, listed
in metrics, instead of those of compile.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Regressor(keras.Model):
    """Train with a loss and metrics that compile does not know."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.Huber(delta=0.5)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        self.optimizer.apply_gradients(
            zip(
                tape.gradient(loss, self.trainable_weights),
                self.trainable_weights,
                strict=True,
            )
        )
        self.loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        self.mae_metric.update_state(y, y_pred)
        return {
            "loss": self.loss_tracker.result(),
            "mae": self.mae_metric.result(),
        }

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(
            self.loss_fn(y, y_pred), sample_weight=tf.shape(x)[0]
        )
        self.mae_metric.update_state(y, y_pred)
        return {
            "loss": self.loss_tracker.result(),
            "mae": self.mae_metric.result(),
        }

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


keras.utils.set_random_seed(5)
rng = np.random.default_rng(5)
x = rng.normal(size=(70, 4)).astype("float32")
y = (x**2).sum(axis=1, keepdims=True).astype("float32")

inputs = keras.Input((4,))
model = Regressor(
    inputs, layers.Dense(1)(layers.Dense(10, activation="tanh")(inputs))
)
model.compile(optimizer=keras.optimizers.Nadam(0.02))
history = model.fit(
    x[:50],
    y[:50],
    batch_size=16,
    epochs=3,
    validation_data=(x[50:], y[50:]),
    verbose=0,
)
score = model.evaluate(x, y, batch_size=32, verbose=0, return_dict=True)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
}
