"""An endless dataset with steps_per_epoch and validation_steps, validated
every second epoch.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(53)
rng = np.random.default_rng(53)
x = rng.normal(size=(40, 4)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
train = (
    tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40).repeat().batch(10)
)
test = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(12)

model = keras.Sequential(
    [keras.Input((4,)), layers.Dense(6, activation="swish"), layers.Dense(1)]
)
model.compile(
    keras.optimizers.Adam(0.02),
    keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(
    train,
    steps_per_epoch=5,
    epochs=4,
    validation_data=test,
    validation_steps=3,
    validation_freq=2,
    verbose=0,
)
score = model.evaluate(test, steps=4, verbose=0)
logits = model.predict(test, steps=2, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
    "logits": logits,
}
