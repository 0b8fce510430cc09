"""Semi-supervised learning: the model's own predictions become labels of the
next call of fit.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(69)
rng = np.random.default_rng(69)
centres = rng.normal(size=(3, 5)) * 2
kinds = rng.integers(0, 3, 84)
x = (centres[kinds] + rng.normal(size=(84, 5))).astype("float32")
labelled, unlabelled = slice(0, 24), slice(24, 84)

model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(8, activation="relu"),
        layers.Dense(3, activation="softmax"),
    ]
)
model.compile(
    keras.optimizers.Adam(0.02),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
supervised = model.fit(
    x[labelled], kinds[labelled], batch_size=8, epochs=3, verbose=0
)

guesses = model.predict(x[unlabelled], batch_size=16, verbose=0)
sure = guesses.max(axis=1) > 0.5
guessed = model.fit(
    np.concatenate([x[labelled], x[unlabelled][sure]]),
    np.concatenate([kinds[labelled], guesses[sure].argmax(axis=1)]),
    batch_size=16,
    epochs=2,
    verbose=0,
)
score = model.evaluate(x, kinds, verbose=0)

result = {
    "supervised": supervised.history,
    "guessed": guessed.history,
    "weights": model.get_weights(),
    "sure": sure,
    "score": score,
}
