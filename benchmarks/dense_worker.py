"""One process of benchmarks/dense.py: train the CIFAR-10 network on constant images in one of four ways."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

WARMUP_STEPS = 8


def main() -> None:
    """Train and write this process's median seconds a step, and its memory, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["alone", "hvdkit", "horovod", "multiworker"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="images on each rank")
    parser.add_argument("--folder", type=Path, required=True, help="where results go and processes meet")
    parser.add_argument("--number", type=int, help="this process among --processes, where no launcher says it")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    step, number = {"alone": alone, "hvdkit": with_hvdkit, "horovod": with_horovod, "multiworker": multiworker}[
        args.way
    ](args)
    for _ in range(WARMUP_STEPS):
        float(step())
    meet(args.folder, number, args.processes)
    seconds = []
    for _ in range(args.steps):
        started = time.perf_counter()
        float(step())
        seconds.append(time.perf_counter() - started)
    result = {
        "ms": 1000 * sorted(seconds)[len(seconds) // 2],
        "mean_ms": 1000 * sum(seconds) / len(seconds),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    (args.folder / f"result-{number}.json").write_text(json.dumps(result))
    meet(args.folder, number, args.processes, "end")


def meet(folder: Path, number: int, processes: int, where: str = "start") -> None:
    """Wait until every process is here, so that they are timed while all of them run."""
    (folder / f"{where}-{number}").touch()
    while len(list(folder.glob(f"{where}-*"))) < processes:
        time.sleep(0.001)


def workload(batch: int):
    """Return the network, its loss and a batch of constant images: the same in all four ways."""
    import cifar10
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((24, 24, 3)), *cifar10.network(10)])
    rng = np.random.default_rng(0)
    images = tf.constant(rng.normal(size=(batch, 24, 24, 3)), tf.float32)
    labels = tf.constant(rng.integers(0, 10, batch), tf.int32)

    def loss_of(images, labels):
        logits = model(images, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.reduce_mean(losses) + tf.add_n(model.losses)

    return model, loss_of, images, labels


def plain_step(optimizer, tape_of, model, loss_of, images, labels):
    """Return a compiled training step; ``tape_of`` wraps the tape."""
    import tensorflow as tf

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(images, labels)
        grads = tape_of(tape).gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(grads, model.trainable_variables)
        return loss

    return step


def alone(args):
    """Train by itself, knowing of no other process."""
    import keras

    return plain_step(keras.optimizers.SGD(0.01), lambda tape: tape, *workload(args.batch)), args.number


def with_hvdkit(args):
    """Train with hvdkit's optimizer and defaults."""
    import hvdkit as hk

    hk.init()
    import keras

    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.01))
    return plain_step(optimizer, lambda tape: tape, *workload(args.batch)), hk.rank()


def with_horovod(args):
    """Train with Horovod's own tape, which averages where it is given TensorFlow's variables."""
    import horovod.tensorflow as hvd

    hvd.init()
    import keras

    return plain_step(keras.optimizers.SGD(0.01), hvd.DistributedGradientTape, *workload(args.batch)), hvd.rank()


def multiworker(args):
    """Train under tf.distribute.MultiWorkerMirroredStrategy, which makes the average in its optimizer step."""
    ports = os.environ["HVDKIT_BENCH_PORTS"].split(",")
    workers = [f"127.0.0.1:{port}" for port in ports]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": args.number}}
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        import keras

        model, loss_of, images, labels = workload(args.batch)
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)

    def replica():
        with tf.GradientTape() as tape:
            loss = loss_of(images, labels)
        grads = tape.gradient(loss, [v.value for v in model.trainable_variables])
        # Its optimizer adds gradients up, so each replica takes its share of the mean.
        grads = [g / strategy.num_replicas_in_sync for g in grads]
        optimizer.apply(grads, model.trainable_variables)
        return loss

    @tf.function
    def step():
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(replica), axis=None)

    return step, args.number


if __name__ == "__main__":
    main()
