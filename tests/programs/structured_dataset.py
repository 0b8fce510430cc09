"""Structured data: a dataset of dicts, lookups and text vectorised in its
map.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(24)
rng = np.random.default_rng(24)
words = np.array(["good", "bad", "fine", "poor", "great", "weak"])
texts = np.array(
    [" ".join(rng.choice(words, rng.integers(2, 6))) for _ in range(53)]
)
stars = rng.integers(1, 6, 53)
liked = np.array(["good" in t or "great" in t for t in texts]).astype(
    "float32"
)

vectorize = layers.TextVectorization(
    max_tokens=10, output_mode="int", output_sequence_length=6
)
vectorize.adapt(texts)
dataset = tf.data.Dataset.from_tensor_slices(
    ({"text": texts, "stars": stars}, liked)
).batch(14)
dataset = dataset.map(
    lambda row, label: (
        {"words": vectorize(row["text"]), "stars": row["stars"]},
        label,
    )
)

words_in = keras.Input((6,), name="words", dtype="int64")
stars_in = keras.Input((), name="stars", dtype="int64")
bag = layers.GlobalAveragePooling1D()(
    layers.Embedding(10, 4, mask_zero=True)(words_in)
)
joined = layers.concatenate([bag, layers.Embedding(6, 2)(stars_in)])
model = keras.Model(
    {"words": words_in, "stars": stars_in}, layers.Dense(1)(joined)
)
model.compile(
    optimizer=keras.optimizers.Lion(0.01),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
history = model.fit(
    dataset.take(3), validation_data=dataset.skip(3), epochs=3, verbose=0
)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": model.evaluate(dataset, verbose=0),
}
