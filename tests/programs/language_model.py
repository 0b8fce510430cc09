"""A causal language model: next tokens as labels, padding ignored by the
loss's ignore_class.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(21)
rng = np.random.default_rng(21)
text = rng.integers(1, 16, (48, 9))
text[np.arange(9) >= rng.integers(4, 10, 48)[:, None]] = 0
dataset = tf.data.Dataset.from_tensor_slices(text).shuffle(48).batch(10)
dataset = dataset.map(lambda t: (t[:, :-1], t[:, 1:]))

tokens = keras.Input((8,), dtype="int32")
hidden = layers.Embedding(16, 12)(tokens) + layers.Embedding(8, 12)(
    ops.expand_dims(ops.arange(8), 0)
)
attended = layers.MultiHeadAttention(2, 6, use_bias=False)(
    hidden, hidden, use_causal_mask=True
)
hidden = layers.LayerNormalization()(hidden + attended)
model = keras.Model(tokens, layers.Dense(16)(hidden))
model.compile(
    optimizer=keras.optimizers.Adam(0.01, epsilon=1e-5),
    loss=keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=0
    ),
    metrics=["accuracy"],
)
history = model.fit(dataset, epochs=2, verbose=0)
logits = model.predict(text[:, :-1], verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "logits": logits,
}
