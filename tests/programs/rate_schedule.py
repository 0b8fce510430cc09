"""A schedule object in the optimizer, gradients clipped by their global norm,
and weight decay.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(42)
rng = np.random.default_rng(42)
x = rng.normal(size=(66, 6)).astype("float32")
y = (10 * x[:, :2]).astype("float32")

schedule = keras.optimizers.schedules.CosineDecay(
    0.01, decay_steps=12, warmup_target=0.1, warmup_steps=4
)
model = keras.Sequential(
    [keras.Input((6,)), layers.Dense(9, activation="selu"), layers.Dense(2)]
)
model.compile(
    keras.optimizers.AdamW(schedule, weight_decay=0.02, global_clipnorm=0.5),
    "mse",
    metrics=["cosine_similarity"],
)
history = model.fit(x, y, batch_size=16, epochs=3, verbose=0)

result = {
    "history": history.history,
    "weights": model.get_weights(),
    "rate": float(model.optimizer.learning_rate),
}
