"""The two ways to train a classifier over all ranks: a hand-written loop, and Keras's fit."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hvdkit as hk  # before keras: a launched rank must load TensorFlow and MPI in this order

# isort: split
import keras
import numpy as np
import tensorflow as tf
from console import progress, say
from inputs import Dataset, ImageFiles


def loop(config: Any, model: keras.Model, batches: hk.data.GlobalBatches, average: Any) -> None:
    """Train by hand. Every line that involves other ranks calls hvdkit."""
    optimizer = model.optimizer
    log = hk.callbacks.StepLog(config.global_batch_size(), every=config.log_every)
    per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    @tf.function
    def train_step(images, labels, sample_weight):
        with tf.GradientTape() as tape:
            losses = per_example(labels, model(images, training=True))
            # The mean of these over ranks is the mean over the global batch, however it is divided.
            loss = tf.reduce_mean(losses * sample_weight) + tf.add_n(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    with (
        folder(config.logdir) as logdir,
        hk.Supervisor(logdir, model=model, data=batches, state={"log": log}, **options(config, average)) as sv,
        progress(config.steps) as show,
    ):
        for images, labels in sv.batches(until=config.steps):
            loss = train_step(images, labels, batches.sample_weight)
            average.update(tf.constant(sv.global_step + 1, tf.int64))
            sv.step(loss=loss, learning_rate=optimizer.learning_rate)
            if sv.global_step % config.log_every == 0:
                log.step(sv.global_step, hk.allreduce(loss))
            show(sv.global_step)


def fit(config: Any, model: keras.Model, batches: hk.data.GlobalBatches, average: Any) -> None:
    """Train with Keras's fit: the same steps, losses and weights as :func:`loop`."""
    with folder(config.logdir) as logdir, progress(config.steps) as show:
        keep = hk.callbacks.SupervisorCallback(logdir, until=config.steps, data=batches, **options(config, average))
        callbacks = [
            _MovingAverage(average, keep),  # before the save that includes it
            keep,
            hk.callbacks.MetricAverage(),
            hk.callbacks.StopOnNonFinite(stop=not config.allow_nonfinite),
            hk.callbacks.StepLog(config.global_batch_size(), every=config.log_every),
            keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: show(keep.supervisor.global_step)),
        ]
        epochs = -(-config.steps // batches.steps_per_epoch)
        model.fit(batches.as_keras(), epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False)


def options(config: Any, average: Any) -> dict[str, Any]:
    """Return the Supervisor's options for both forms."""
    return {
        "variables": average.averages,
        "save_model_secs": config.save_model_secs,
        "max_to_keep": config.max_to_keep,
        "summary_steps": config.log_every,
        "gather": config.logdir is None,
        "stop_on_nonfinite": not config.allow_nonfinite,
    }


class _MovingAverage(keras.callbacks.Callback):
    """Keep the moving average of the weights."""

    def __init__(self, average: Any, keep: hk.callbacks.SupervisorCallback) -> None:
        super().__init__()
        self.average, self.keep = average, keep

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.average.update(tf.constant(self.keep.supervisor.global_step + 1, tf.int64))


def evaluate(model: keras.Model, data: Dataset | ImageFiles, *, batch_size: int = 256) -> float:
    """Return the accuracy over all held-out examples; each rank evaluates up to ``batch_size`` at once."""
    batches = hk.data.GlobalBatches(data.test, batch_size * hk.size(), shuffle=data.shuffle, epochs=1)
    right = seen = 0
    for images, labels in batches:
        classes = tf.argmax(model(images, training=False), 1).numpy()
        right += int(np.sum((classes == labels)[batches.mask]))
        seen += batches.count
    right, seen = hk.grouped_allreduce([right, seen], hk.Sum)
    return right / seen


@contextlib.contextmanager
def folder(logdir: Path | None) -> Iterator[Path]:
    """Yield ``logdir``, or a folder on the chief's host that is removed at the end."""
    if logdir is not None:
        yield logdir
        return
    path = Path(hk.broadcast_object(tempfile.mkdtemp() if hk.is_chief() else ""))
    try:
        yield path
        say(f"{path} is removed; --logdir DIR keeps checkpoints and curves")
    finally:
        if hk.is_chief():
            shutil.rmtree(path, ignore_errors=True)
