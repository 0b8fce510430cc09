"""Train a table that is larger than any one rank should hold, and check rows of it by hand.

    horovodrun -np 4 python benchmarks/large_table.py                          # 8 GB: 31,250,000 x 64 float32, SGD
    horovodrun -np 4 python benchmarks/large_table.py --optimizer adagrad      # and 8 GB of slots

Prints what making it took, milliseconds a step, and each rank's memory at its peak.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import hvdkit as hk

hk.init()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

WIDTH, SAMPLES, FEATURES, RATE = 64, 4096, 26, 0.5


def main() -> None:
    """Make the table, train, check, and print on the chief."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=31_250_000, help="default: 31,250,000, 8 GB")
    parser.add_argument("--optimizer", choices=["sgd", "adagrad"], default="sgd")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    before = peak()
    started = time.perf_counter()
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
    peaks = hk.allgather_object(peak())
    if hk.is_chief():
        print(f"{args.rows:,} x {WIDTH} float32, {args.optimizer}, {hk.size()} ranks: {held:.2f} GiB held a rank")
        print(f"made in {making:.1f} s; {statistics.median(milliseconds):.0f} ms a step of {SAMPLES} x {FEATURES} ids")
        print(f"memory of a rank at its peak: {max(peaks):.2f} GiB, {max(peaks) - before - held:+.2f} beside the table")
        print("the last row has every rank's gradients, the first none")


def check(found: np.ndarray, first: np.ndarray, args: argparse.Namespace) -> None:
    """Compare rows that nobody asked for with their first values, and the one of all ranks with the formula."""
    np.testing.assert_array_equal(found[:3], first[:3])
    gradient, row, total = 2.0 * hk.size(), first[3].astype(np.float64), 0.1
    for _ in range(args.steps):
        total += gradient**2
        row -= RATE * gradient / (np.sqrt(total) if args.optimizer == "adagrad" else 1.0)
    np.testing.assert_allclose(found[3], row, rtol=1e-4)


def peak() -> float:
    """Return this process's largest resident memory so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
