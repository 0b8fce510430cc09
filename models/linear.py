"""Linear regression, the parameter-server tutorials' first example: epoch, loss, W and b as it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import hvdkit as hk  # before keras: a launched rank loads TensorFlow and MPI in the order that works

# isort: split
import keras
import numpy as np
import tensorflow as tf
from inputs import Dataset, linear_data, load_diabetes


@dataclass(frozen=True, kw_only=True)
class Config:
    """Fit a line, or scikit-learn's diabetes measurements."""

    data: Literal["line", "diabetes"] = "line"
    """Points on y = 2 x + 0.5 with noise, or 442 patients with ten measurements each."""
    epochs: int = 20
    """Passes over the data."""
    batch_size: int = 32
    """Examples in a step, over all ranks."""
    learning_rate: float = 0.1
    """Learning rate of SGD."""
    seed: int = 0
    """Seed of the data, their order and the initial weights."""

    def load(self) -> Dataset:
        """Return the table."""
        return linear_data(seed=self.seed) if self.data == "line" else load_diabetes(seed=self.seed)


def run(config: Config) -> float:
    """Train over all ranks, printing epoch, loss, W and b on the chief; return the held-out mean squared error."""
    data = config.load()
    batches = hk.data.GlobalBatches(
        (data.x_train, data.y_train), config.batch_size, shuffle_seed=config.seed, epochs=config.epochs
    )
    keras.utils.set_random_seed(config.seed)
    model = keras.Sequential([keras.Input(data.x_train.shape[1:]), keras.layers.Dense(1)])
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(config.learning_rate))
    optimizer.build(model.trainable_variables)
    hk.broadcast_variables(model.variables + optimizer.variables)

    @tf.function
    def train_step(x, y, sample_weight):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y)[:, 0] * sample_weight)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = []
    for step, (x, y) in enumerate(batches, start=1):
        loss = train_step(x, y, batches.sample_weight)
        hk.callbacks.check_finite(float(loss), step=step)
        losses.append(loss)
        if step % batches.steps_per_epoch == 0:
            mean = hk.allreduce(float(tf.reduce_mean(losses)))
            _report(step // batches.steps_per_epoch, mean, model)
            losses = []
    error = float(np.mean(np.square(model(data.x_test) - data.y_test)))
    if hk.is_chief():
        print(f"held-out mean squared error {error:.4f}", flush=True)
    return error


def _report(epoch: int, loss: float, model: keras.Model) -> None:
    if hk.is_chief():
        weights, bias = (", ".join(f"{x:.4f}" for x in v.numpy().ravel()) for v in model.variables)
        print(f"epoch {epoch}, loss = {loss:.4f}, W = [{weights}], b = [{bias}]", flush=True)
