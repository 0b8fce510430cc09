"""BatchNormalization(synchronized=True): statistics of the global batch."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(30)
rng = np.random.default_rng(30)
x = (rng.normal(size=(53, 5)) * [1, 2, 3, 4, 5] + 3).astype("float32")
y = (x.sum(axis=1) > 15).astype("int32")

model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(8, use_bias=False),
        layers.BatchNormalization(synchronized=True, momentum=0.9),
        layers.ReLU(),
        layers.Dense(2, activation="softmax"),
    ]
)
model.compile(
    keras.optimizers.SGD(0.1),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(
    x, y, batch_size=16, epochs=3, validation_data=(x[:20], y[:20]), verbose=0
)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "outputs": model.predict(x, verbose=0),
}
