"""The programs of ``hvdkit doctor --smoke``: ``python -m hvdkit.commands.doctor.smoke_program NAME [LOGDIR STEPS]``.

Each trains for a few steps on all ranks and compares the result with one process, or with a formula in NumPy.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import hvdkit as hk  # before keras: a launched rank must load TensorFlow and MPI in this order

# isort: split
import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

ROWS = 10
COLUMNS = 3
BATCH = 12
KILLED_AT_STEP = 3
KILLED_RANK = 1


def systems(logdir: str, steps: str) -> None:
    """Train a partitioned variable, a sharded table, a convolutional network and a line, each in a loop."""
    _partitioned_variable()
    _sharded_table()
    _convolutional_network()
    line(logdir, steps)


def _partitioned_variable() -> None:
    """w <- 2 w + 1 on each rank's rows, five times."""
    variable = hk.PartitionedVariable((ROWS, COLUMNS), initializer="ones")
    expected = 1.0
    for _ in range(5):
        variable.apply(lambda rows: rows * 2 + 1)
        expected = expected * 2 + 1
    _check_equal("partitioned variable", variable.gather(), np.full((ROWS, COLUMNS), expected))


def _sharded_table() -> None:
    """One step of Adagrad on a table whose rows are spread over the ranks: a = 0.1 + g^2, w = 1 - lr g / sqrt(a)."""
    table = hk.layers.ShardedEmbedding(ROWS, COLUMNS, embeddings_initializer="ones")
    optimizer = hk.DistributedOptimizer(keras.optimizers.Adagrad(0.1), op=hk.Sum)

    @tf.function
    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table(ids))
        optimizer.apply(tape.gradient(loss, table.trainable_variables), table.trainable_variables)

    step(tf.constant([0, hk.rank() + 1]))
    expected = np.ones((ROWS, COLUMNS))
    gradients = np.zeros(ROWS)
    gradients[0] = hk.size()
    gradients[1 : hk.size() + 1] = 1
    expected -= (0.1 * gradients / np.sqrt(0.1 + gradients**2 + 1e-7))[:, None]
    _check_equal("sharded table", table.gather(), expected)


def _convolutional_network() -> None:
    """Average the gradients of different batches; all ranks must keep equal weights."""
    keras.utils.set_random_seed(1)
    model = _network()
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images, labels = _images(hk.rank())

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    hk.broadcast_variables(model.variables)
    for _ in range(3):
        step()
    hk.compare_variables(model.trainable_variables)


def fit() -> None:
    """Train a Keras program with ``hk.fit`` on all ranks, and with Keras's ``fit`` in each process."""
    images, labels = _images(0)

    def trained(call: Callable[..., keras.callbacks.History]) -> tuple[keras.Model, dict[str, list[float]]]:
        keras.utils.set_random_seed(2)
        model = _network()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
        history = call(model, images, labels, batch_size=5, epochs=2, verbose=0)
        return model, history.history

    one, expected = trained(lambda model, *args, **options: model.fit(*args, **options))
    many, found = trained(hk.fit)
    for name, values in expected.items():
        _check_equal(f"hk.fit's {name}", found[name], values, tolerance=1e-3)
    for mine, theirs in zip(many.weights, one.weights, strict=True):
        _check_equal(f"hk.fit's {theirs.path}", mine.numpy(), theirs.numpy(), tolerance=1e-3)


def line(logdir: str, steps: str) -> None:
    """Fit a line under a Supervisor until ``steps``, from the checkpoint in ``logdir`` if there is one."""
    x = np.linspace(-1, 1, BATCH, dtype="float32")[:, None]
    y = 2 * x + 0.5
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.2))
    batches = hk.data.GlobalBatches((x, y), BATCH, as_tensors=True)
    with hk.Supervisor(logdir, model=model, optimizer=optimizer, data=batches) as supervisor:
        for inputs, targets in supervisor.batches(until=int(steps)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(inputs) - targets)[:, 0] * batches.sample_weight)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            supervisor.step(loss=loss)
    expected = np.zeros(2)  # weight and bias of one process
    for _ in range(int(steps)):
        error = expected[0] * x + expected[1] - y
        expected -= 0.2 * 2 * np.array([np.mean(error * x), np.mean(error)])
    _check_equal(f"the line after {steps} steps", [v.numpy().item() for v in model.variables], expected, 1e-4)
    hk.compare_variables(model.variables)


def kill() -> None:
    """Kill one rank in the middle of a loop; the others wait for it in a collective."""
    for number in range(100):
        if number == KILLED_AT_STEP and hk.rank() == KILLED_RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        hk.allreduce(np.ones(1, "float32"))


def _network() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(10)]
    )


def _images(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(13, 8, 8, 1)).astype("float32"), rng.integers(0, 10, 13)


def _check_equal(what: str, found: npt.ArrayLike | None, expected: npt.ArrayLike, tolerance: float = 1e-5) -> None:
    difference = float(np.max(np.abs(np.asarray(found) - np.asarray(expected))))
    if not difference <= tolerance:
        raise AssertionError(f"{what}: differs by {difference:.3g} from one process, expected at most {tolerance:g}")


PROGRAMS = {program.__name__: program for program in (systems, fit, line, kill)}


def main() -> None:
    """Run the program that the command line names."""
    name, *arguments = sys.argv[1:]
    hk.init()
    PROGRAMS[name](*arguments)
    hk.barrier()
    if hk.is_chief():
        sys.stdout.write(f"smoke: {name} passed on {hk.size()} ranks\n")


if __name__ == "__main__":
    main()
