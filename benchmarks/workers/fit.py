"""One rank of benchmarks/fit.py: train a model by Keras's fit, or by a hand-written loop, on the same batches.

Both have what such a script has: hvdkit's optimizer, the chief's first weights, a log line every ten steps, and the
mean loss of the epoch over all ranks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import hvdkit as hk

# isort: split
import keras
import networks  # noqa: F401  (where models/ is)
import numpy as np
import tensorflow as tf
from timing import leave, parser

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))

import cifar10
from inputs import planted_clicks
from recommender import Recommender

LOG_EVERY, EPOCHS = 10, 4  # the first warms up
BATCH = {"cifar10": 64, "recommender": 500}  # examples a rank


def main() -> None:
    """Train, and leave the median epoch's milliseconds a step."""
    options = parser(__doc__)
    options.add_argument("form", choices=["fit", "loop"])
    options.add_argument("--model", choices=BATCH, default="cifar10")
    args = options.parse_args()
    hk.init()
    keras.utils.set_random_seed(0)
    batch = BATCH[args.model] * hk.size()
    model, loss, data = {"cifar10": images, "recommender": clicks}[args.model](batch * args.steps)
    batches = hk.data.GlobalBatches(data, batch, shuffle_seed=0, remainder="drop")
    log = hk.callbacks.StepLog(batch, every=LOG_EVERY)
    seconds = {"fit": by_fit, "loop": by_loop}[args.form](model, loss, batches, log)
    leave(args.folder, hk.rank(), {"ms": 1000 * float(np.median(seconds[1:])) / args.steps})
    hk.barrier()


def images(examples: int):
    """Return the CIFAR-10 tutorial's network, its loss for each example, and images as they are behind distortion."""
    model = keras.Sequential([keras.Input((24, 24, 3)), *cifar10.network(10)])
    rng = np.random.default_rng(0)
    data = rng.normal(size=(examples, 24, 24, 3)).astype("float32"), rng.integers(0, 10, examples)
    return model, keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"), data


def clicks(examples: int):
    """Return the click model with its 26 tables, its loss for each example, and made examples."""
    made = planted_clicks(examples * 5 // 4, rows=5000, seed=0)
    model = Recommender(made.rows, 4, 0)
    inputs, labels = made.part(False)
    inputs, labels = {name: part[:examples] for name, part in inputs.items()}, labels[:examples]
    model({name: part[:1] for name, part in inputs.items()})
    return model, keras.losses.BinaryCrossentropy(from_logits=True, reduction="none"), (inputs, labels)


def by_fit(model, loss, batches, log) -> list[float]:
    """Train with Keras's fit; return the seconds of every epoch."""
    seconds: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            seconds.append(time.perf_counter() - self.started)

    mean = type(loss)(from_logits=True)  # fit wants a number, not one for each example
    model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.01)), mean, jit_compile=False)
    callbacks = [hk.callbacks.BroadcastInitial(), hk.callbacks.MetricAverage(), log, Clock()]
    model.fit(batches.as_keras(), epochs=EPOCHS, callbacks=callbacks, verbose=0, shuffle=False)
    return seconds


def by_loop(model, loss, batches, log) -> list[float]:
    """Train by hand; return the seconds of every epoch."""
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.01))
    mean = keras.metrics.Mean()

    @tf.function
    def train_step(x, y, sample_weight):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(y, model(x, training=True)) * sample_weight)
            value += tf.add_n(model.losses) if model.losses else 0.0
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        mean.update_state(value, tf.shape(sample_weight)[0])
        return value

    hk.broadcast_variables(model.variables)
    seconds, per_epoch = [], batches.steps_per_epoch
    started = time.perf_counter()
    for steps, (x, y) in enumerate(batches, start=1):
        value = train_step(x, y, batches.sample_weight)
        log.step(steps, value)
        if steps % per_epoch == 0:
            hk.grouped_allreduce([v.value for v in mean.variables], hk.Sum)
            mean.reset_state()
            seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
        if steps == EPOCHS * per_epoch:
            break
    return seconds


if __name__ == "__main__":
    main()
