"""A wide sparse input: a SparseTensor passed to fit, and a dataset of
SparseTensors. A wide sparse input: a SparseTensor passed to fit, and a
dataset of SparseTensors.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(68)
rng = np.random.default_rng(68)
dense = rng.random((50, 30)) * (rng.random((50, 30)) < 0.1)
x = tf.sparse.from_dense(dense.astype("float32"))
y = dense.sum(axis=1, keepdims=True).astype("float32")

model = keras.Sequential(
    [
        keras.Input((30,), sparse=True),
        layers.Dense(6, activation="relu"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.02), "mse")
history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
again = model.fit(dataset, epochs=2, verbose=0)

result = {
    "history": history.history,
    "again": again.history,
    "weights": model.get_weights(),
}
