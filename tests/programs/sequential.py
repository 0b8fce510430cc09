"""A Sequential classifier on arrays: shuffled, with validation_split,
evaluated and used to predict.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)
x = rng.normal(size=(90, 8)).astype("float32")
y = (x[:, :3].argmax(axis=1)).astype("int32")

model = keras.Sequential(
    [
        keras.Input((8,)),
        layers.Dense(16, activation="relu"),
        layers.Dense(3, activation="softmax"),
    ]
)
model.compile(
    optimizer="rmsprop",
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(x, y, batch_size=16, epochs=3, validation_split=0.2)
score = model.evaluate(x, y, batch_size=32, verbose=0)
probabilities = model.predict(x, batch_size=20, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
    "probabilities": probabilities,
}
