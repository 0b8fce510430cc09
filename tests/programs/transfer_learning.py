"""Transfer learning: a frozen base, then fine-tuning at a low rate of all its
layers but BatchNormalization.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(29)
rng = np.random.default_rng(29)
x = rng.random((45, 8, 8, 3)).astype("float32")
y = (x.mean(axis=(1, 2, 3)) > 0.5).astype("float32")

base = keras.Sequential(
    [
        keras.Input((8, 8, 3)),
        layers.Conv2D(6, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.Activation("relu"),
        layers.GlobalAveragePooling2D(),
    ],
    name="base",
)
statistics = [
    rng.normal(size=w.shape).astype("float32") ** 2 + 0.1
    for w in base.layers[1].get_weights()
]
base.layers[1].set_weights(statistics)
base.trainable = False

inputs = keras.Input((8, 8, 3))
hidden = layers.Rescaling(2.0, offset=-1.0)(inputs)
hidden = base(hidden, training=False)
model = keras.Model(inputs, layers.Dense(1)(hidden))
loss = keras.losses.BinaryCrossentropy(from_logits=True)
model.compile(
    keras.optimizers.Adam(), loss, metrics=[keras.metrics.BinaryAccuracy()]
)
frozen = model.fit(x, y, batch_size=16, epochs=2, verbose=0)

for layer in base.layers:
    layer.trainable = not isinstance(layer, layers.BatchNormalization)
model.compile(
    keras.optimizers.Adam(1e-3),
    loss,
    metrics=[keras.metrics.BinaryAccuracy()],
)
tuned = model.fit(x, y, batch_size=16, epochs=2, verbose=0)

result = {
    "frozen": frozen.history,
    "tuned": tuned.history,
    "weights": model.get_weights(),
}
