"""A functional residual network for regression, with validation data and an
optimizer given by name.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(2)
rng = np.random.default_rng(2)
x = rng.normal(size=(72, 6)).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True)).astype("float32")
x_train, x_test, y_train, y_test = x[:60], x[60:], y[:60], y[60:]

inputs = keras.Input((6,), name="features")
hidden = layers.Dense(12, activation="tanh")(inputs)
residual = layers.add([hidden, layers.Dense(12, activation="tanh")(hidden)])
outputs = layers.Dense(1)(residual)
model = keras.Model(inputs, outputs)
model.compile(
    "adam", "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()]
)
history = model.fit(
    x_train,
    y_train,
    batch_size=20,
    epochs=4,
    validation_data=(x_test, y_test),
    verbose=2,
)
score = model.evaluate(x_test, y_test, verbose=0, return_dict=True)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
}
