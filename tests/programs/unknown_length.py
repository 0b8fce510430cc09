"""A tf.data.Dataset from a generator: batched, of unknown length, for
training and validation.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(45)
data = np.random.default_rng(45).normal(size=(61, 3)).astype("float32")


def rows(start, stop):
    for row in data[start:stop]:
        yield row, row.sum(keepdims=True)


def dataset(start, stop):
    signature = (
        tf.TensorSpec((3,), tf.float32),
        tf.TensorSpec((1,), tf.float32),
    )
    return tf.data.Dataset.from_generator(
        lambda: rows(start, stop), output_signature=signature
    ).batch(12)


model = keras.Sequential(
    [keras.Input((3,)), layers.Dense(6, activation="relu"), layers.Dense(1)]
)
model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
history = model.fit(
    dataset(0, 43), epochs=3, validation_data=dataset(43, 61), verbose=0
)
outputs = model.predict(dataset(43, 61), verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "outputs": outputs,
    "score": model.evaluate(dataset(0, 61), verbose=0),
}
