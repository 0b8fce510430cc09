"""save_weights and load_weights around two calls of fit, and a JSON of the
architecture.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(44)
rng = np.random.default_rng(44)
x = rng.normal(size=(40, 4)).astype("float32")
y = (x.max(axis=1) > 1).astype("float32")

model = keras.Sequential(
    [keras.Input((4,)), layers.Dense(6, activation="gelu"), layers.Dense(1)]
)
model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
first = model.fit(x, y, epochs=2, verbose=0)
model.save_weights("first.weights.h5")

twin = keras.models.model_from_json(model.to_json())
twin.load_weights("first.weights.h5")
twin.compile("adam", keras.losses.BinaryFocalCrossentropy(from_logits=True))
second = twin.fit(x, y, epochs=2, batch_size=12, verbose=0)

result = {
    "first": first.history,
    "second": second.history,
    "weights": twin.get_weights(),
}
