"""A small U-Net: labels of shape (rows, height, width), mean intersection
over union.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(17)
rng = np.random.default_rng(17)
images = rng.random((28, 8, 8, 3)).astype("float32")
masks = images.argmax(axis=-1).astype("uint8")

inputs = keras.Input((8, 8, 3))
down = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
bottom = layers.MaxPooling2D()(down)
bottom = layers.SeparableConv2D(12, 3, padding="same", activation="relu")(
    bottom
)
up = layers.Conv2DTranspose(
    8, 3, strides=2, padding="same", activation="relu"
)(bottom)
outputs = layers.Conv2D(3, 1, activation="softmax")(
    layers.concatenate([down, up])
)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(0.01),
    loss="sparse_categorical_crossentropy",
    metrics=[
        "accuracy",
        keras.metrics.MeanIoU(num_classes=3, sparse_y_pred=False, name="iou"),
    ],
)
history = model.fit(
    images, masks, batch_size=8, epochs=3, validation_split=0.25, verbose=0
)
segments = model.predict(images, batch_size=8, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "segments": segments,
}
