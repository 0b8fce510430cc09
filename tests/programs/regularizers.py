"""Penalties of every kind: kernels, activities, add_loss in a layer;
constraints and spectral normalisation.
"""

import keras
import numpy as np
from keras import layers, ops


class ActivityPenalty(layers.Layer):
    """Pay for large activities by add_loss."""

    def call(self, inputs):
        self.add_loss(0.05 * ops.mean(ops.square(inputs)))
        return inputs


keras.utils.set_random_seed(60)
rng = np.random.default_rng(60)
x = rng.normal(size=(50, 6)).astype("float32")
y = x[:, :2]

inputs = keras.Input((6,))
hidden = layers.Dense(
    8,
    activation="tanh",
    kernel_regularizer=keras.regularizers.L1L2(0.01, 0.01),
    bias_regularizer="l2",
)(inputs)
hidden = ActivityPenalty()(hidden)
hidden = layers.Dense(
    6,
    activity_regularizer=keras.regularizers.L1(0.01),
    kernel_constraint="max_norm",
)(hidden)
outputs = layers.Dense(
    2, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.01)
)(hidden)
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mse"])
history = model.fit(
    x, y, batch_size=16, epochs=3, validation_split=0.2, verbose=0
)

result = {"history": history.history, "weights": model.get_weights()}
