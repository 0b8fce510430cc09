"""A dataset with cache, a map that augments by stateless seeds, a shuffle
with a seed, and prefetch.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(65)
rng = np.random.default_rng(65)
x = rng.normal(size=(48, 4)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")


def jitter(index, row):
    features, label = row
    noise = tf.random.stateless_normal((4,), seed=tf.stack([index, 7]))
    return features + 0.1 * noise, label


train = (
    tf.data.Dataset.from_tensor_slices((x[:40], y[:40]))
    .cache()
    .enumerate()
    .map(jitter)
)
train = train.shuffle(40, seed=3).batch(12).prefetch(tf.data.AUTOTUNE)
test = tf.data.Dataset.from_tensor_slices((x[40:], y[40:])).batch(4)

model = keras.Sequential(
    [
        keras.Input((4,)),
        layers.Dense(6, activation="relu"),
        layers.Dense(2, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(train, epochs=3, validation_data=test, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": model.evaluate(test, verbose=0),
}
