"""Dicts of inputs and outputs: a loss, weight and metrics for each output."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(48)
rng = np.random.default_rng(48)
x = {
    "title": rng.integers(0, 20, (54, 6)),
    "tags": rng.integers(0, 2, (54, 4)).astype("float32"),
}
y = {
    "priority": rng.random((54, 1)).astype("float32"),
    "department": rng.integers(0, 3, 54),
}

title = keras.Input((6,), name="title", dtype="int32")
tags = keras.Input((4,), name="tags")
features = layers.concatenate(
    [layers.GlobalAveragePooling1D()(layers.Embedding(20, 5)(title)), tags]
)
outputs = {
    "priority": layers.Dense(1, activation="sigmoid", name="priority")(
        features
    ),
    "department": layers.Dense(3, name="department")(features),
}
model = keras.Model({"title": title, "tags": tags}, outputs)
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-2),
    loss={
        "priority": keras.losses.BinaryCrossentropy(),
        "department": keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        ),
    },
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"priority": ["mae"], "department": ["accuracy"]},
)
history = model.fit(
    x, y, epochs=3, batch_size=16, validation_split=0.25, verbose=0
)
predictions = model.predict(x, verbose=0)
score = model.evaluate(x, y, verbose=0, return_dict=True)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "predictions": predictions,
    "score": score,
}
