"""LoRA: a model is trained, then only low-rank updates of its layers."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(32)
rng = np.random.default_rng(32)
tokens = rng.integers(0, 18, (60, 5))
labels = (tokens.sum(axis=1) % 3).astype("int32")

model = keras.Sequential(
    [
        keras.Input((5,), dtype="int32"),
        layers.Embedding(18, 6, name="tokens"),
        layers.Flatten(),
        layers.Dense(12, activation="relu", name="hidden"),
        layers.Dense(3, activation="softmax"),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
pretrained = model.fit(tokens, labels, batch_size=20, epochs=2, verbose=0)

model.get_layer("tokens").enable_lora(rank=2)
model.get_layer("hidden").enable_lora(rank=2)
model.compile(
    keras.optimizers.AdamW(0.02),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
tuned = model.fit(tokens, 2 - labels, batch_size=20, epochs=2, verbose=0)

result = {
    "pretrained": pretrained.history,
    "tuned": tuned.history,
    "weights": model.get_weights(),
    "trainable": [w.path for w in model.trainable_weights],
}
