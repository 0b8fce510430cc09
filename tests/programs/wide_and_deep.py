"""Wide and deep: Normalization, StringLookup and IntegerLookup adapted to the
data, inputs as a dict.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(23)
rng = np.random.default_rng(23)
rows = 70
x = {
    "age": rng.uniform(20, 60, (rows, 1)).astype("float32"),
    "income": rng.lognormal(10, 1, (rows, 1)).astype("float32"),
    "city": tf.constant(
        rng.choice(["oslo", "rome", "cairo", "lima"], (rows, 1))
    ),
    "zone": rng.choice([3, 7, 11], (rows, 1)),
}
y = ((x["age"] > 40) ^ (x["zone"] == 7)).astype("float32")

numbers, codes, inputs = [], [], {}
for name in ("age", "income"):
    inputs[name] = keras.Input((1,), name=name)
    normalization = layers.Normalization()
    normalization.adapt(x[name])
    numbers.append(normalization(inputs[name]))
inputs["city"] = keras.Input((1,), name="city", dtype="string")
city = layers.StringLookup(output_mode="int")
city.adapt(x["city"])
codes.append((city(inputs["city"]), city.vocabulary_size()))
inputs["zone"] = keras.Input((1,), name="zone", dtype="int64")
zone = layers.IntegerLookup(output_mode="int")
zone.adapt(x["zone"])
codes.append((zone(inputs["zone"]), zone.vocabulary_size()))

wide = layers.concatenate(
    [
        layers.CategoryEncoding(size, output_mode="multi_hot")(code)
        for code, size in codes
    ]
)
deep = layers.concatenate(
    numbers
    + [
        layers.Flatten()(layers.Embedding(size, 3)(code))
        for code, size in codes
    ]
)
deep = layers.Dense(8, activation="relu")(deep)
outputs = layers.Dense(1, activation="sigmoid")(
    layers.concatenate([wide, deep])
)
model = keras.Model(inputs, outputs)
model.compile(
    keras.optimizers.Ftrl(0.05),
    "binary_crossentropy",
    metrics=["accuracy", "auc"],
)
history = model.fit(
    x, y, batch_size=16, epochs=3, validation_split=0.2, verbose=0
)
clicks = model.predict(x, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "clicks": clicks,
}
