"""Training steps to measure: a model, its loss and its batches, the same on every machine.

    work = workload("cifar10", batch=64)
    step = train_step(work, hk.DistributedOptimizer(optimizer("sgd")))
    times = measure(step, work.batches(), steps=25, warm_up=8)

Images and labels are random numbers: only the time of a step is meaningful, not the trained model. Importing this
module loads neither TensorFlow nor Keras; call ``hk.init()`` before :func:`workload`.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, SupportsFloat, TypeAlias, get_args

from hvdkit.errors import describe, integer

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

Inputs: TypeAlias = "tf.Tensor | dict[str, tf.Tensor]"
ModelName = Literal["mlp", "cifar10", "resnet50", "vgg16", "recommender"]
OptimizerName = Literal["sgd", "momentum", "adagrad", "adam"]
MODELS: tuple[str, ...] = get_args(ModelName)
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
# Defaults: examples per step on each rank, and the optimizer.
BATCHES = {"mlp": 32, "cifar10": 64, "resnet50": 8, "vgg16": 8, "recommender": 1024}
USUAL_OPTIMIZERS = {
    "mlp": "sgd",
    "cifar10": "sgd",
    "resnet50": "momentum",
    "vgg16": "momentum",
    "recommender": "adagrad",
}
_DISTINCT_BATCHES = 8

# The recommender: number of tables, their rows and width, number of dense inputs, and skew of the ids.
TABLES = 26
ROWS = 40_000
WIDTH = 16
NUMBERS = 13
ZIPF = 1.2


@dataclass(frozen=True)
class Workload:
    """The computation of a training step."""

    model: keras.Model  # built, with the same initial values on every rank
    loss: Callable[[Inputs, tf.Tensor], tf.Tensor]  # from a batch's inputs and labels to the mean, a scalar
    data: tuple[tuple[Inputs, tf.Tensor], ...]  # some different batches of this rank

    def batches(self) -> Iterator[tuple[Inputs, tf.Tensor]]:
        """Yield this rank's batches, repeated endlessly."""
        return itertools.cycle(self.data)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the dense gradients, which are averaged over ranks in each step."""
        from hvdkit.sharding.shards import shard_of

        return sum(_bytes(v) for v in self.model.trainable_variables if shard_of(v) is None)

    @property
    def sharded_bytes(self) -> int:
        """Bytes of this rank's shards of tables, whose gradients are exchanged by rows."""
        from hvdkit.sharding.shards import shard_of

        return sum(_bytes(v) for v in self.model.trainable_variables if shard_of(v) is not None)


def workload(name: str, batch: int | None = None, seed: int = 0, rank: int | None = None) -> Workload:
    """Build the workload ``name``.

    Args:
        name: "mlp" (100 MB of float32 gradients), "cifar10" (the CIFAR-10 tutorial's network on 24x24 images),
            "resnet50" and "vgg16" (keras.applications, 32x32 images), or "recommender" (26 sharded tables and a small
            dense part).
        batch: examples per step on each rank; by default :data:`BATCHES`.
        seed: seed of weights and data; ranks have the same weights and different data.
        rank: the rank whose data to make, by default this one; a process that does not use hvdkit's ranks passes it.

    Raises:
        ValueError: the workload does not exist, or ``batch`` is less than 1.
        ClusterError: neither ``rank`` was passed nor ``hk.init()`` called.

    Example::

        hk.init()
        print(workload("mlp").gradient_bytes)  # 100794408
    """
    if name not in _BUILDERS:
        raise ValueError(describe("--model", name, " or ".join(MODELS), "pass one of them"))
    batch = BATCHES[name] if batch is None else integer("--batch", batch, minimum=1)

    import keras
    import numpy as np

    from hvdkit import cluster

    keras.utils.set_random_seed(seed)
    generator = np.random.default_rng([seed, cluster.rank() if rank is None else rank])
    return _BUILDERS[name](batch, generator)


def optimizer(name: str, learning_rate: float = 0.01) -> keras.optimizers.Optimizer:
    """Return a plain Keras optimizer: "sgd", "momentum", "adagrad" or "adam".

    Raises:
        ValueError: ``name`` is not one of these.
    """
    import keras

    if name not in OPTIMIZERS:
        raise ValueError(describe("--optimizer", name, " or ".join(OPTIMIZERS), "pass one of them"))
    if name == "momentum":
        return keras.optimizers.SGD(learning_rate, momentum=0.9)
    return keras.optimizers.get({"class_name": name, "config": {"learning_rate": learning_rate}})


def train_step(work: Workload, optimizer: keras.optimizers.Optimizer) -> tf.types.experimental.PolymorphicFunction:
    """Return a compiled training step, a ``tf.function`` from inputs and labels to the loss.

    Args:
        work: the workload.
        optimizer: a ``hk.DistributedOptimizer``, or a plain Keras optimizer if the rank trains independently.
    """
    import tensorflow as tf

    variables = work.model.trainable_variables

    @tf.function(reduce_retracing=True)
    def step(inputs: Inputs, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = work.loss(inputs, labels)
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return step


def measure(
    step: Callable[..., SupportsFloat],
    batches: Iterable[tuple[object, ...]],
    steps: int,
    warm_up: int = 8,
    each: Callable[[int], None] = lambda number: None,
) -> list[float]:
    """Return the seconds of each of ``steps`` steps after ``warm_up`` steps; each step reads the loss.

    Args:
        step: called with a batch; returns the loss.
        batches: at least ``warm_up + steps`` batches.
        steps: number of steps to time.
        warm_up: number of steps to run before: the first one traces the graph, and memory and caches fill.
        each: called after every step with the step's number, from 1; its time is not included.

    Raises:
        ValueError: there are too few batches.
    """
    times = []
    source = iter(batches)
    for number in range(1, warm_up + steps + 1):
        started = time.perf_counter()
        batch = next(source, None)
        if batch is None:
            remedy = "pass an iterator that does not end"
            raise ValueError(describe("batches", number - 1, f"{warm_up + steps} of them", remedy))
        float(step(*batch))
        if number > warm_up:
            times.append(time.perf_counter() - started)
        each(number)
    return times


# ---- the models -----------------------------------------------------------------------------------------------


def _mlp(batch: int, rng: np.random.Generator) -> Workload:
    """Return a network with 25 million weights in layers of 2048: little computation relative to its gradients."""
    import keras

    layers = [keras.layers.Dense(2048, "relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((2048,)), *layers, keras.layers.Dense(10)])
    return _classifier(batch, rng, model)


def _cifar10(batch: int, rng: np.random.Generator) -> Workload:
    """Return the network of TensorFlow's CIFAR-10 tutorial, 1,068,298 weights; models/cifar10.py trains it."""
    import keras
    import tensorflow as tf

    def normalization() -> keras.layers.Layer:
        return keras.layers.Lambda(lambda x: tf.nn.local_response_normalization(x, 4, 1.0, 0.001 / 9.0, 0.75))

    def dense(units: int) -> keras.layers.Layer:
        return keras.layers.Dense(units, "relu", kernel_regularizer=keras.regularizers.L2(0.002))

    conv = keras.layers.Conv2D
    pool = keras.layers.MaxPooling2D
    layers = [
        conv(64, 5, padding="same", activation="relu"),
        pool(3, 2, padding="same"),
        normalization(),
        conv(64, 5, padding="same", activation="relu"),
        normalization(),
        pool(3, 2, padding="same"),
        keras.layers.Flatten(),
        dense(384),
        dense(192),
        keras.layers.Dense(10),
    ]
    return _classifier(batch, rng, keras.Sequential([keras.Input((24, 24, 3)), *layers]))


def _application(batch: int, rng: np.random.Generator, *, name: str) -> Workload:
    """Return ResNet-50 or VGG-16 from keras.applications, for small images and ten classes."""
    import keras

    make = getattr(keras.applications, name)
    model = make(weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None)
    return _classifier(batch, rng, model)


def _classifier(batch: int, rng: np.random.Generator, model: keras.Model) -> Workload:
    """Return a classification workload with random inputs and ten classes."""
    import tensorflow as tf

    inputs = tf.constant(rng.normal(size=(batch, *model.input_shape[1:])), tf.float32)
    labels = tf.constant(rng.integers(0, 10, batch), tf.int32)

    def loss(inputs: Inputs, labels: tf.Tensor) -> tf.Tensor:
        logits = model(inputs, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.add_n([tf.reduce_mean(losses), *model.losses])

    return Workload(model, loss, ((inputs, labels),))


def _recommender(batch: int, rng: np.random.Generator) -> Workload:
    """Return a click model: an embedding for each of 26 ids, dense inputs, and a small network on top."""
    import keras
    import numpy as np
    import tensorflow as tf

    from hvdkit.layers import ShardedEmbeddingCollection, Table

    tables = [Table(f"c{i}", ROWS, WIDTH) for i in range(TABLES)]
    ids = {table.name: keras.Input((), dtype="int64", name=table.name) for table in tables}
    numbers = keras.Input((NUMBERS,), name="numbers")
    embedded = ShardedEmbeddingCollection(tables)(ids)
    bottom = keras.layers.Dense(WIDTH, "relu")(keras.layers.Dense(64, "relu")(numbers))
    features = keras.layers.Concatenate()([bottom, *(embedded[table.name] for table in tables)])
    top = keras.layers.Dense(1)(keras.layers.Dense(64, "relu")(keras.layers.Dense(128, "relu")(features)))
    model = keras.Model({**ids, "numbers": numbers}, top)

    def loss(inputs: Inputs, labels: tf.Tensor) -> tf.Tensor:
        logits = model(inputs, training=True)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))

    def random_batch() -> tuple[Inputs, tf.Tensor]:
        # A few ids are frequent, spread over all rows, as in real logs.
        drawn = (rng.zipf(ZIPF, size=(TABLES, batch)) * 2_654_435_761) % ROWS
        inputs = {f"c{i}": tf.constant(column, tf.int64) for i, column in enumerate(drawn)}
        inputs["numbers"] = tf.constant(rng.normal(size=(batch, NUMBERS)), tf.float32)
        return inputs, tf.constant(rng.integers(0, 2, (batch, 1)).astype(np.float32))

    return Workload(model, loss, tuple(random_batch() for _ in range(_DISTINCT_BATCHES)))


def _bytes(variable: keras.Variable) -> int:
    import tensorflow as tf

    return int(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size)


_BUILDERS: dict[str, Callable[[int, np.random.Generator], Workload]] = {
    "mlp": _mlp,
    "cifar10": _cifar10,
    "resnet50": functools.partial(_application, name="ResNet50"),
    "vgg16": functools.partial(_application, name="VGG16"),
    "recommender": _recommender,
}
