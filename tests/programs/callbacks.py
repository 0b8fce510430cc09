"""ModelCheckpoint, EarlyStopping, ReduceLROnPlateau, CSVLogger and
TensorBoard, in one list.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(39)
rng = np.random.default_rng(39)
x = rng.normal(size=(60, 4)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
y[45:] = 1 - y[45:]  # validation gets worse as training gets better

model = keras.Sequential(
    [
        keras.Input((4,)),
        layers.Dense(8, activation="tanh"),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy"]
)
callbacks = [
    keras.callbacks.ModelCheckpoint(
        "models/epoch-{epoch:02d}.keras",
        monitor="val_loss",
        save_freq="epoch",
    ),
    keras.callbacks.ModelCheckpoint(
        "best.weights.h5",
        monitor="val_loss",
        save_best_only=True,
        save_weights_only=True,
    ),
    keras.callbacks.ReduceLROnPlateau(
        monitor="val_loss", factor=0.5, patience=2, min_delta=1e-3
    ),
    keras.callbacks.EarlyStopping(
        monitor="val_loss",
        patience=4,
        min_delta=1e-3,
        restore_best_weights=True,
    ),
    keras.callbacks.CSVLogger("log.csv"),
    keras.callbacks.TensorBoard("logs", histogram_freq=0, write_graph=False),
]
history = model.fit(
    x[:45],
    y[:45],
    batch_size=16,
    epochs=12,
    validation_data=(x[45:], y[45:]),
    callbacks=callbacks,
    verbose=0,
)
best = keras.saving.load_model("models/epoch-02.keras")

result = {
    "history": history.history,
    "epochs": history.epoch,
    "weights": model.get_weights(),
    "rate": float(model.optimizer.learning_rate),
    "second epoch": best.get_weights(),
}
