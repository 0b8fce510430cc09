"""An image classifier with one-hot labels, label smoothing and a progress
bar, evaluated on held-out images.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(62)
rng = np.random.default_rng(62)
images = rng.integers(0, 256, (64, 8, 8, 1)).astype("uint8")
labels = keras.utils.to_categorical(
    images.reshape(64, -1).argmax(axis=1) % 3, 3
)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Rescaling(1.0 / 255),
        layers.Conv2D(8, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Conv2D(8, 2, activation="relu"),
        layers.Flatten(),
        layers.Dense(3, activation="softmax"),
    ]
)
model.compile(
    loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
    optimizer="adam",
    metrics=["accuracy", keras.metrics.TopKCategoricalAccuracy(2)],
)
history = model.fit(
    images[:50], labels[:50], batch_size=16, epochs=2, validation_split=0.1
)
score = model.evaluate(images[50:], labels[50:])

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
}
