"""Fraud in imbalanced data: counts, Precision, Recall, AUC and F1 for
training and validation.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(38)
rng = np.random.default_rng(38)
x = rng.normal(size=(90, 7)).astype("float32")
y = (x[:, :2].sum(axis=1, keepdims=True) > 1.6).astype("float32")

model = keras.Sequential(
    [
        keras.Input((7,)),
        layers.Dense(8, activation="relu"),
        layers.Dense(1, activation="sigmoid"),
    ]
)
metrics = [
    keras.metrics.FalseNegatives(name="fn"),
    keras.metrics.FalsePositives(name="fp"),
    keras.metrics.TrueNegatives(name="tn"),
    keras.metrics.TruePositives(name="tp"),
    keras.metrics.Precision(name="precision"),
    keras.metrics.Recall(name="recall"),
    keras.metrics.AUC(name="auc"),
    keras.metrics.AUC(name="prc", curve="PR", num_thresholds=50),
    keras.metrics.F1Score(name="f1", threshold=0.5),
    keras.metrics.PrecisionAtRecall(0.5, name="precision_at_recall"),
]
model.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss="binary_crossentropy",
    metrics=metrics,
)
history = model.fit(
    x,
    y,
    batch_size=32,
    epochs=4,
    verbose=0,
    validation_data=(x[::3], y[::3]),
    class_weight={0: 1.0, 1: 5.0},
)
score = model.evaluate(x, y, verbose=0, return_dict=True)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "score": score,
}
