"""Custom metrics: a class with sums, a function, and one that wraps a
function by mean.
"""

import keras
import numpy as np
from keras import layers, ops


class WithinTolerance(keras.metrics.Metric):
    """The share and the number of rows with an error below a tolerance."""

    def __init__(self, tolerance=0.5, name="within", **kwargs):
        super().__init__(name=name, **kwargs)
        self.tolerance = tolerance
        self.hits = self.add_variable(
            shape=(), initializer="zeros", name="hits"
        )
        self.rows = self.add_variable(
            shape=(), initializer="zeros", name="rows"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        hit = ops.cast(ops.abs(y_true - y_pred) < self.tolerance, self.dtype)
        self.hits.assign(self.hits + ops.sum(hit))
        self.rows.assign(self.rows + ops.cast(ops.size(hit), self.dtype))

    def result(self):
        return self.hits / self.rows


def worst_error(y_true, y_pred):
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


keras.utils.set_random_seed(50)
rng = np.random.default_rng(50)
x = rng.normal(size=(55, 4)).astype("float32")
y = np.stack([x.sum(axis=1), x.min(axis=1)], axis=1)

model = keras.Sequential(
    [keras.Input((4,)), layers.Dense(8, activation="tanh"), layers.Dense(2)]
)
model.compile(
    optimizer=keras.optimizers.Adamax(0.02),
    loss="mae",
    metrics=[
        WithinTolerance(),
        worst_error,
        keras.metrics.MeanMetricWrapper(worst_error, name="wrapped"),
    ],
)
history = model.fit(
    x, y, batch_size=16, epochs=3, validation_split=0.2, verbose=0
)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": model.evaluate(x, y, batch_size=25, verbose=0, return_dict=True),
}
