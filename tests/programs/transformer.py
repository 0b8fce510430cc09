"""A text classifier with one transformer block and positions, both custom
layers.
"""

import keras
import numpy as np
from keras import layers, ops


class TransformerBlock(layers.Layer):
    """Attention and a feed-forward network, each with a residual."""

    def __init__(self, embed_dim, num_heads, ff_dim):
        super().__init__()
        self.attention = layers.MultiHeadAttention(
            num_heads=num_heads, key_dim=embed_dim // num_heads
        )
        self.feed_forward = keras.Sequential(
            [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.norm1 = layers.LayerNormalization(epsilon=1e-6)
        self.norm2 = layers.LayerNormalization(epsilon=1e-6)

    def call(self, inputs):
        hidden = self.norm1(inputs + self.attention(inputs, inputs))
        return self.norm2(hidden + self.feed_forward(hidden))


class TokenAndPositionEmbedding(layers.Layer):
    """The sum of a token's vector and its position's."""

    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token = layers.Embedding(vocab_size, embed_dim)
        self.position = layers.Embedding(maxlen, embed_dim)

    def call(self, x):
        return self.token(x) + self.position(ops.arange(0, ops.shape(x)[-1]))


keras.utils.set_random_seed(20)
rng = np.random.default_rng(20)
x = rng.integers(0, 25, (56, 8))
y = (x[:, 0] > x[:, 1]).astype("int32")

inputs = keras.Input((8,), dtype="int32")
hidden = TransformerBlock(8, 2, 16)(
    TokenAndPositionEmbedding(8, 25, 8)(inputs)
)
hidden = layers.GlobalAveragePooling1D()(hidden)
model = keras.Model(inputs, layers.Dense(2, activation="softmax")(hidden))
model.compile(
    keras.optimizers.SGD(0.1, momentum=0.9),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(
    x, y, batch_size=16, epochs=2, validation_data=(x[:24], y[:24]), verbose=0
)

result = {"history": history.history, "weights": model.get_weights()}
