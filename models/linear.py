"""Linear regression, the first example of the parameter-server tutorials; prints epoch, loss, W and b."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import hvdkit as hk  # before keras: a launched rank must load TensorFlow and MPI in this order

# isort: split
import keras
import numpy as np
import tensorflow as tf
from console import say
from inputs import Dataset, linear_data, load_diabetes
from training import folder


@dataclass(frozen=True, kw_only=True)
class Config:
    """Fit a line, or scikit-learn's diabetes measurements."""

    data: Literal["line", "diabetes"] = "line"
    """Points on y = 2 x + 0.5 with noise, or 442 patients with ten measurements each."""
    epochs: int = 20
    """Passes over the data."""
    batch_size: int = 32
    """Examples per step, over all ranks."""
    learning_rate: float = 0.1
    """Learning rate of SGD."""
    seed: int = 0
    """Seed of the data, their order and the initial weights."""
    logdir: Path | None = None
    """Save here, and continue from the newest checkpoint in it. Default: a folder that is removed at the end."""
    save_model_secs: float = 5
    """Seconds between two checkpoints."""
    max_to_keep: int = 1
    """Checkpoints to keep."""
    sleep: float = 0.0
    """Seconds to sleep after each step: time to press Ctrl-C, or to kill a rank, and start again."""

    def load(self) -> Dataset:
        """Return the table."""
        return linear_data(seed=self.seed) if self.data == "line" else load_diabetes(seed=self.seed)


def run(config: Config) -> float:
    """Train over all ranks, printing epoch, loss, W and b on the chief; return the held-out mean squared error."""
    data = config.load()
    batches = hk.data.GlobalBatches(
        (data.x_train, data.y_train),
        config.batch_size,
        shuffle_seed=config.seed,
        epochs=config.epochs,
        as_tensors=True,
    )
    keras.utils.set_random_seed(config.seed)
    model = keras.Sequential([keras.Input(data.x_train.shape[1:]), keras.layers.Dense(1)])
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(config.learning_rate))
    total = tf.Variable(0.0, name="epoch_loss")  # sum of this epoch's losses so far

    @tf.function
    def train_step(x, y, sample_weight):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y)[:, 0] * sample_weight)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    with (
        folder(config.logdir) as logdir,
        hk.Supervisor(
            logdir,
            model=model,
            optimizer=optimizer,
            data=batches,
            variables=[total],
            gather=config.logdir is None,
            save_model_secs=config.save_model_secs,
            max_to_keep=config.max_to_keep,
            summary_steps=10,
        ) as sv,
    ):
        for x, y in sv.batches():
            if sv.global_step % batches.steps_per_epoch == 0:
                total.assign(0.0)
            loss = hk.allreduce(train_step(x, y, batches.sample_weight))
            total.assign_add(loss)
            sv.step(loss=loss)
            if sv.global_step % batches.steps_per_epoch == 0:
                _report(sv.global_step // batches.steps_per_epoch, float(total) / batches.steps_per_epoch, model)
            time.sleep(config.sleep)
    error = float(np.mean(np.square(model(data.x_test) - data.y_test)))
    say(f"held-out mean squared error {error:.4f}")
    return error


def _report(epoch: int, loss: float, model: keras.Model) -> None:
    weights, bias = (", ".join(f"{x:.4f}" for x in v.numpy().ravel()) for v in model.variables)
    say(f"epoch {epoch}, loss = {loss:.4f}, W = [{weights}], b = [{bias}]")
