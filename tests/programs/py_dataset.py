"""A keras.utils.PyDataset, once in order and once with fit's shuffle of its
batches. A keras.utils.PyDataset, once in order and once with fit's shuffle of
its batches.
"""

import math

import keras
import numpy as np
from keras import layers


class Batches(keras.utils.PyDataset):
    """Rows of two arrays, a batch at a time; reversed after each epoch."""

    def __init__(self, x, y, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y
        self.batch_size = batch_size

    def __len__(self):
        return math.ceil(len(self.x) / self.batch_size)

    def __getitem__(self, index):
        start = index * self.batch_size
        stop = min(start + self.batch_size, len(self.x))
        return self.x[start:stop], self.y[start:stop]

    def on_epoch_end(self):
        self.x, self.y = self.x[::-1], self.y[::-1]


keras.utils.set_random_seed(46)
rng = np.random.default_rng(46)
x = rng.normal(size=(58, 4)).astype("float32")
y = (x > 0).sum(axis=1)

model = keras.Sequential(
    [keras.Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(5)]
)
model.compile(
    "adam",
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
ordered = model.fit(
    Batches(x, y, 16),
    epochs=2,
    shuffle=False,
    validation_data=Batches(x[:20], y[:20], 8),
    verbose=0,
)
shuffled = model.fit(Batches(x, y, 10), epochs=2, verbose=0)

result = {
    "ordered": ordered.history,
    "shuffled": shuffled.history,
    "weights": model.get_weights(),
    "logits": model.predict(Batches(x, y, 16), verbose=0),
}
