"""One rank of benchmarks/fit.py: train a model in several variants in turn, or evaluate it on one rank and on all.

A variant trains two epochs per turn, and only the second is timed: in the first, steps may compile and ranks compare
weights. All variants run in one process, so that a slow minute of the machine affects all of them. models/ is on
the path.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from functools import partial

import hvdkit as hk

# isort: split
import keras
import numpy as np
import tensorflow as tf
from inputs import planted_clicks
from recommender import Recommender
from timing import leave, meet, parser

from hvdkit.commands.measure.workloads import workload

BATCH = {"cifar10": 64, "clicks": 500, "classes": 32, "masks": 4}  # examples per rank
Clocked = np.ndarray  # seconds, and CPU seconds


def main() -> None:
    """Write the milliseconds of every variant in every round."""
    options = parser(__doc__)
    options.add_argument("--model", choices=BATCH, default="cifar10")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--evaluate", action="store_true", help="evaluate instead of training")
    options.add_argument("--scopes", action="store_true", help="compare losses of own rows and of all ranks' rows")
    args = options.parse_args()
    hk.init()
    batch = BATCH[args.model] * hk.size()
    work = {"cifar10": images, "clicks": clicks, "classes": classes, "masks": masks}[args.model]
    made = evaluations if args.evaluate else scopes if args.scopes else trainings
    variants = made(lambda: work(batch * args.steps), batch, args)
    rounds = [turns(variants, number, args.steps) for number in range(-1, args.rounds)]
    figures = {
        f"{variant} {key} {r}": n for r, each in enumerate(rounds[1:]) for variant, f in each.items() for key, n in f
    }
    leave(args.folder, hk.rank(), figures)
    hk.barrier()


def turns(variants: dict[str, Callable[[], Clocked]], number: int, steps: int) -> dict[str, list[tuple[str, float]]]:
    """Run every variant once, in an order shuffled by ``number``; return milliseconds per step."""
    found = {}
    for variant in random.Random(number).sample(sorted(variants), len(variants)):
        hk.barrier()
        wall, cpu = variants[variant]()
        found[variant] = [("ms", 1000 * wall / steps), ("cpu_ms", 1000 * cpu / steps)]
    return found


def images(examples: int):
    """Return the CIFAR-10 tutorial's network, its loss class, and distorted images."""
    model = workload("cifar10").model
    rng = np.random.default_rng(0)
    data = rng.normal(size=(examples, 24, 24, 3)).astype("float32"), rng.integers(0, 10, examples)
    return model, keras.losses.SparseCategoricalCrossentropy, data


def clicks(examples: int):
    """Return the click model with its 26 tables, its loss class, and generated examples."""
    keras.utils.set_random_seed(0)
    made = planted_clicks(examples * 5 // 4, rows=5000, seed=0)
    model = Recommender(made.rows, 4, 0)
    inputs, labels = made.part(False)
    inputs, labels = {name: part[:examples] for name, part in inputs.items()}, labels[:examples]
    model({name: part[:1] for name, part in inputs.items()})
    return model, keras.losses.BinaryCrossentropy, (inputs, labels)


def classes(examples: int):
    """Return MobileNetV2 for 1,000 classes, its loss class, and images of 64 x 64."""
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2(weights=None, input_shape=(64, 64, 3), classifier_activation=None)
    rng = np.random.default_rng(0)
    data = rng.normal(size=(examples, 64, 64, 3)).astype("float32"), rng.integers(0, 1000, examples)
    return model, keras.losses.SparseCategoricalCrossentropy, data


def masks(examples: int):
    """Return a U-Net for two classes of pixels, its loss class, and images of 256 x 256."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inputs = keras.Input((256, 256, 3))
    x = inputs
    skips = []
    for filters in (8, 16, 32):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(64, 3, padding="same", activation="relu")(x)
    for skip in reversed(skips):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
        x = layers.Conv2D(skip.shape[-1], 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Conv2D(2, 1)(x))
    rng = np.random.default_rng(0)
    images = rng.normal(size=(examples, 256, 256, 3)).astype("float32")
    return model, keras.losses.SparseCategoricalCrossentropy, (images, rng.integers(0, 2, (examples, 256, 256)))


class Clock(keras.callbacks.Callback):
    """Measures the time of the last epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.started = now()

    def on_epoch_end(self, epoch, logs=None):
        self.epoch = now() - self.started


def now() -> Clocked:
    """Return the time, and the CPU time of this process."""
    return np.array([time.perf_counter(), time.process_time()])


def compiled(work, optimizer):
    """Return a compiled model and its data."""
    model, loss, data = work()
    model.compile(optimizer, loss(from_logits=True), jit_compile=False)
    return model, data


def trainings(work, batch, args) -> dict[str, Callable[[], Clocked]]:
    """Return all variants of training."""
    variants = {
        "loop": by_loop(work, batch, args.steps),
        "fit": by_callbacks(work, batch),
        "hk": by_hk_fit(work, batch),
    }
    if hk.size() == 1:
        variants["plain"] = by_plain_fit(work, batch, args.model == "clicks")
    return variants


def scopes(work, batch, args) -> dict[str, Callable[[], Clocked]]:
    """Return hk.fit with the loss of each rank's rows, and with that of the rows of all ranks."""
    return {scope: by_hk_fit(work, batch, loss_scope=scope) for scope in ("rows", "batch")}


def second_epoch(fit: Callable[..., object]) -> Callable[[], Clocked]:
    """Return a variant that trains two epochs with ``fit``, which gets the callbacks, and times the second."""

    def train():
        clock = Clock()
        fit(epochs=2, callbacks=[clock], verbose=0)
        return clock.epoch

    return train


def by_plain_fit(work, batch, tables):
    """Train with Keras alone, on one rank; hvdkit's tables need hvdkit's optimizer."""
    plain = keras.optimizers.SGD(0.01)
    model, (x, y) = compiled(work, hk.DistributedOptimizer(plain) if tables else plain)
    return second_epoch(partial(model.fit, x, y, batch_size=batch))


def by_hk_fit(work, batch, **options):
    """Train with hk.fit."""
    model, (x, y) = compiled(work, keras.optimizers.SGD(0.01))
    return second_epoch(partial(hk.fit, model, x, y, batch_size=batch, **options))


def by_callbacks(work, batch):
    """Train with Keras's fit on each rank's batches, with hvdkit's optimizer and callbacks."""
    model, data = compiled(work, hk.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    batches = hk.data.GlobalBatches(data, batch, shuffle_seed=0, remainder="drop")

    def fit(callbacks, **options):
        callbacks = [hk.callbacks.BroadcastInitial(), hk.callbacks.MetricAverage(), *callbacks]
        model.fit(batches.as_keras(), callbacks=callbacks, shuffle=False, **options)

    return second_epoch(fit)


def by_loop(work, batch, steps):
    """Train with a hand-written loop, which also computes the mean loss over all ranks."""
    model, loss, data = work()
    each = loss(from_logits=True, reduction="none")
    optimizer, mean = hk.DistributedOptimizer(keras.optimizers.SGD(0.01)), keras.metrics.Mean()
    batches = hk.data.GlobalBatches(data, batch, shuffle_seed=0, remainder="drop")
    source = itertools.chain.from_iterable(batches for _ in itertools.count())

    @tf.function
    def train_step(x, y, sample_weight):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(each(y, model(x, training=True)) * sample_weight)
            value += tf.add_n(model.losses) if model.losses else 0.0
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        mean.update_state(value, tf.shape(sample_weight)[0])

    hk.broadcast_variables(model.variables)

    def train():
        for _ in range(2):
            started = now()
            for x, y in itertools.islice(source, steps):
                train_step(x, y, batches.sample_weight)
            hk.grouped_allreduce([v.value for v in mean.variables], hk.Sum)
            mean.reset_state()
            epoch = now() - started
        return epoch

    return train


def evaluations(work, batch, args) -> dict[str, Callable[[], Clocked]]:
    """Return an evaluation by rank 0 while the other ranks sleep, and one by all ranks."""
    (alone, (x, y)), (together, _) = (compiled(work, "sgd") for _ in range(2))
    number = itertools.count()

    def one():
        place, started = f"alone-{next(number)}", now()
        if hk.is_chief():
            alone.evaluate(x, y, batch_size=batch, verbose=0)
        passed = now() - started
        meet(args.folder, hk.rank(), hk.size(), place)
        return passed

    def all_ranks():
        started = now()
        hk.evaluate(together, x, y, batch_size=batch, verbose=0)
        return now() - started

    return {"one": one, "all": all_ranks}


if __name__ == "__main__":
    main()
