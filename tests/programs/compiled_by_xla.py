"""jit_compile=True: the step compiled by XLA."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(58)
rng = np.random.default_rng(58)
x = rng.normal(size=(48, 5)).astype("float32")
y = x.argmax(axis=1)

model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(8, activation="relu"),
        layers.Dense(5, activation="softmax"),
    ]
)
model.compile(
    keras.optimizers.SGD(0.1),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
    jit_compile=True,
)
history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "outputs": model.predict(x, verbose=0),
}
