"""A model that overrides compute_loss, ignores sample_weight, and tracks the
loss in its own metric.
"""

import keras
import numpy as np
from keras import layers, ops


class Smooth(keras.Model):
    """Fit the targets, and pay for steep outputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="data_loss")

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        data_loss = ops.mean(ops.square(y_pred - y))
        self.tracker.update_state(data_loss, sample_weight=ops.shape(x)[0])
        return (
            data_loss
            + 0.01 * ops.mean(ops.abs(y_pred))
            + 0.1 * sum(self.losses)
        )

    @property
    def metrics(self):
        return [*super().metrics, self.tracker]


keras.utils.set_random_seed(7)
rng = np.random.default_rng(7)
x = rng.normal(size=(58, 6)).astype("float32")
y = rng.normal(size=(58, 2)).astype("float32")

inputs = keras.Input((6,))
hidden = layers.Dense(
    8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01)
)(inputs)
model = Smooth(inputs, layers.Dense(2)(hidden))
model.compile(optimizer=keras.optimizers.Adam(0.02))
history = model.fit(
    x, y, batch_size=20, epochs=3, validation_data=(x[:21], y[:21]), verbose=0
)

result = {"history": history.history, "weights": model.get_weights()}
