"""Forecasting from windows made by timeseries_dataset_from_array."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(22)
series = np.sin(np.arange(130) / 5.0).astype("float32") + np.linspace(
    0, 1, 130, dtype="float32"
)
train = keras.utils.timeseries_dataset_from_array(
    series[:90, None], series[12:90], sequence_length=12, batch_size=20
)
test = keras.utils.timeseries_dataset_from_array(
    series[90:, None], series[102:], sequence_length=12, batch_size=20
)

model = keras.Sequential(
    [
        keras.Input((12, 1)),
        layers.Conv1D(8, 3, padding="causal", activation="relu"),
        layers.Conv1D(
            8, 3, padding="causal", dilation_rate=2, activation="relu"
        ),
        layers.GlobalMaxPooling1D(),
        layers.Dense(1),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01),
    "mse",
    metrics=["mae", keras.metrics.MeanSquaredLogarithmicError()],
)
history = model.fit(train, epochs=3, validation_data=test, verbose=0)
forecast = model.predict(test, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "forecast": forecast,
}
