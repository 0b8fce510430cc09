"""One rank of benchmarks/large_table.py: train a table too large for one rank, and check rows against a formula."""

from __future__ import annotations

import resource
import statistics
import time

import hvdkit as hk

hk.init()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from timing import leave, parser  # noqa: E402

WIDTH, SAMPLES, FEATURES, RATE = 64, 4096, 26, 0.5


def main() -> None:
    """Create the table, train, check, and write this rank's figures."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=31_250_000)
    options.add_argument("--optimizer", choices=["sgd", "adagrad"], default="sgd")
    args = options.parse_args()
    before, started = peak(), time.perf_counter()
    table = hk.layers.ShardedEmbedding(args.rows, WIDTH, seed=1)
    table.build()
    made = {"sgd": keras.optimizers.SGD, "adagrad": keras.optimizers.Adagrad}[args.optimizer](RATE)
    optimizer = hk.DistributedOptimizer(made, op=hk.Sum)
    optimizer.build(table.trainable_variables)
    hk.barrier()
    making = time.perf_counter() - started

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table(ids))
        optimizer.apply(tape.gradient(loss, table.trainable_variables), table.trainable_variables)

    watched = tf.constant([0, 1, args.rows // 2, args.rows - 1])
    first = table(watched).numpy()
    rng, milliseconds = np.random.default_rng(hk.rank()), []
    for _ in range(args.steps):
        ids = rng.integers(2, args.rows // 2, (SAMPLES, FEATURES))
        ids[0, :2] = args.rows - 1  # on every rank, twice
        hk.barrier()
        started = time.perf_counter()
        step(tf.constant(ids))
        hk.barrier()
        milliseconds.append(1000 * (time.perf_counter() - started))
    check(table(watched).numpy(), first, args)
    held = args.rows * WIDTH * 4 / hk.size() / 2**30 * (2 if args.optimizer == "adagrad" else 1)
    figures = {"made": making, "held": held, "peak": peak(), "beside": peak() - before - held}
    leave(args.folder, hk.rank(), {"ms": statistics.median(milliseconds), **figures})


def check(found: np.ndarray, first: np.ndarray, args) -> None:
    """Compare unused rows with their initial values, and the row used by all ranks with the formula."""
    np.testing.assert_array_equal(found[:3], first[:3])
    gradient, row, total = 2.0 * hk.size(), first[3].astype(np.float64), 0.1
    for _ in range(args.steps):
        total += gradient**2
        row -= RATE * gradient / (np.sqrt(total) if args.optimizer == "adagrad" else 1.0)
    np.testing.assert_allclose(found[3], row, rtol=1e-4)


def peak() -> float:
    """Return this process's peak resident memory in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
