"""Mixed precision with float16, loss scaling included."""

import keras
import numpy as np
from keras import layers

keras.mixed_precision.set_global_policy("mixed_float16")
keras.utils.set_random_seed(34)
rng = np.random.default_rng(34)
x = rng.random((48, 8, 8, 1)).astype("float32")
y = (x[:, :4].mean(axis=(1, 2, 3)) > x[:, 4:].mean(axis=(1, 2, 3))).astype(
    "int32"
)

inputs = keras.Input((8, 8, 1))
hidden = layers.Conv2D(6, 3, activation="relu")(inputs)
hidden = layers.Dense(2)(layers.Flatten()(hidden))
model = keras.Model(
    inputs, layers.Activation("softmax", dtype="float32")(hidden)
)
model.compile(
    keras.optimizers.SGD(0.05),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(x, y, batch_size=16, epochs=3, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "scale": float(model.optimizer.dynamic_scale),
    "precision": model.layers[-2].compute_dtype,
}
