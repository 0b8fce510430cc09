"""A siamese network on labelled pairs: the contrastive loss of a pair does
not depend on other pairs.
"""

import keras
import numpy as np
from keras import layers, ops


def contrastive_loss(y_true, y_pred, margin=1.0):
    near = ops.square(y_pred)
    far = ops.square(ops.maximum(margin - y_pred, 0))
    return ops.mean((1 - y_true) * near + y_true * far, axis=-1)


keras.utils.set_random_seed(13)
rng = np.random.default_rng(13)
left = rng.normal(size=(66, 7)).astype("float32")
right = rng.normal(size=(66, 7)).astype("float32")
different = (rng.random((66, 1)) < 0.5).astype("float32")
right = np.where(different, right, left + 0.1 * right)

tower = keras.Sequential(
    [keras.Input((7,)), layers.Dense(8, activation="tanh"), layers.Dense(4)]
)
a, b = keras.Input((7,)), keras.Input((7,))
distance = ops.sqrt(
    ops.maximum(
        ops.sum(ops.square(tower(a) - tower(b)), axis=1, keepdims=True), 1e-7
    )
)
siamese = keras.Model([a, b], layers.Dense(1, activation="sigmoid")(distance))
siamese.compile(
    loss=contrastive_loss,
    optimizer=keras.optimizers.RMSprop(0.01),
    metrics=["accuracy"],
)
history = siamese.fit(
    [left[:50], right[:50]],
    different[:50],
    validation_data=([left[50:], right[50:]], different[50:]),
    batch_size=16,
    epochs=3,
    verbose=0,
)
similarity = siamese.predict([left, right], verbose=0)

result = {
    "history": history.history,
    "weights": siamese.get_weights(),
    "similarity": similarity,
}
