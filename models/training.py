"""The two ways to train a classifier over all ranks: a hand-written loop, and Keras's fit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import hvdkit as hk  # before keras: a launched rank loads TensorFlow and MPI in the order that works

# isort: split
import keras
import tensorflow as tf
from rich.progress import Progress


def loop(config: Any, model: keras.Model, batches: hk.data.GlobalBatches, average: Any) -> None:
    """Train by hand. Every line that concerns more than one rank is a call of hvdkit's."""
    optimizer = model.optimizer
    log = hk.callbacks.StepLog(config.global_batch_size(), every=config.log_every)
    per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    @tf.function
    def train_step(images, labels, sample_weight):
        with tf.GradientTape() as tape:
            losses = per_example(labels, model(images, training=True))
            # The mean of these over ranks is the mean over the global batch, however it is spread.
            loss = tf.reduce_mean(losses * sample_weight) + tf.add_n(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    with summaries(config) as scalar, progress(config.steps) as advance:
        for step, (images, labels) in zip(range(1, config.steps + 1), batches, strict=False):
            loss = train_step(images, labels, batches.sample_weight)
            hk.callbacks.check_finite(float(loss), step=step, stop=not config.allow_nonfinite)
            average.update(tf.constant(step, tf.int64))
            if step % config.log_every == 0:
                loss = hk.allreduce(loss)
                scalar(step, loss=loss, learning_rate=optimizer.learning_rate)
                log.step(step, loss)
            advance()


def fit(config: Any, model: keras.Model, batches: hk.data.GlobalBatches, average: Any) -> None:
    """Train with Keras's fit: the same steps, losses and weights as :func:`loop`."""
    epochs, steps_left = divmod(config.steps, batches.steps_per_epoch)
    callbacks = [
        hk.callbacks.BroadcastInitial(),
        hk.callbacks.MetricAverage(),
        hk.callbacks.StopOnNonFinite(stop=not config.allow_nonfinite),
        hk.callbacks.StepLog(config.global_batch_size(), every=config.log_every),
        _AfterStep(config.steps, average),
    ]
    if config.log_dir is not None and hk.is_chief():
        callbacks.append(keras.callbacks.TensorBoard(str(config.log_dir), update_freq=config.log_every))
    verbose = 1 if hk.is_chief() and sys.stdout.isatty() else 0
    data = batches.as_keras()
    model.fit(data, epochs=epochs + (steps_left > 0), callbacks=callbacks, verbose=verbose, shuffle=False)


class _AfterStep(keras.callbacks.Callback):
    """Keep the moving average of the weights, and end after the last step asked for."""

    def __init__(self, steps: int, average: Any) -> None:
        super().__init__()
        self.steps, self.average, self.step = steps, average, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        self.average.update(tf.constant(self.step, tf.int64))
        if self.step >= self.steps:
            self.model.stop_training = True


def evaluate(model: keras.Model, images: Any, labels: Any, *, batch_size: int = 256) -> float:
    """Return the accuracy over all held-out examples; each rank looks at its share, uneven or empty."""
    share = slice(len(labels) * hk.rank() // hk.size(), len(labels) * (hk.rank() + 1) // hk.size())
    images, labels = images[share], labels[share]
    right = 0
    for start in range(0, len(labels), batch_size):
        logits = model(images[start : start + batch_size], training=False)
        right += int(tf.reduce_sum(tf.cast(tf.argmax(logits, 1) == labels[start : start + batch_size], tf.int64)))
    right, seen = hk.grouped_allreduce([right, len(labels)], hk.Sum)
    return right / seen


@contextlib.contextmanager
def summaries(config: Any) -> Iterator[Any]:
    """Give a function that writes TensorBoard scalars on the chief, and does nothing on other ranks."""
    if config.log_dir is None or not hk.is_chief():
        yield lambda step, **scalars: None
        return
    writer = tf.summary.create_file_writer(str(config.log_dir))

    def scalar(step: int, **scalars: Any) -> None:
        with writer.as_default(step):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)

    yield scalar
    writer.close()


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Any]:
    """Show a progress bar on the chief's terminal; without a terminal, none."""
    if not hk.is_chief() or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=steps)
        yield lambda: bar.advance(task)
