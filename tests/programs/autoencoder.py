"""A convolutional autoencoder that removes noise: x is the noisy image, y the
clean one.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(28)
rng = np.random.default_rng(28)
clean = np.kron(rng.random((36, 4, 4)), np.ones((2, 2))).astype("float32")[
    ..., None
]
noisy = np.clip(clean + 0.2 * rng.normal(size=clean.shape), 0, 1).astype(
    "float32"
)

inputs = keras.Input((8, 8, 1))
x = layers.Conv2D(
    6,
    3,
    strides=2,
    activation="relu",
    padding="same",
    activity_regularizer="l2",
)(inputs)
x = layers.Conv2DTranspose(
    6, 3, strides=2, activation="relu", padding="same"
)(x)
autoencoder = keras.Model(
    inputs, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x)
)
autoencoder.compile(optimizer="adam", loss="binary_crossentropy")
before = autoencoder.fit(
    x=clean, y=clean, epochs=2, batch_size=10, shuffle=True, verbose=0
)
after = autoencoder.fit(
    noisy,
    clean,
    epochs=2,
    batch_size=10,
    validation_data=(noisy[:9], clean[:9]),
    verbose=0,
)
restored = autoencoder.predict(noisy, verbose=0)

result = {
    "before": before.history,
    "after": after.history,
    "weights": autoencoder.get_weights(),
    "restored": restored,
}
