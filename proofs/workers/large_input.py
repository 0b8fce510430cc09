"""One rank of proofs/large_input.py: train on Parquet files, write the ids of each step, and measure the reading."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import hvdkit as hk

# isort: split
import keras
import numpy as np
import tensorflow as tf
from keras import layers

FEATURES, ITEMS, WIDTH, HIDDEN = 256, 100_000, 16, 256


def main() -> None:
    """Train an epoch, continuing from the last save, in a loop or in ``hk.fit``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logdir", type=Path)
    parser.add_argument("--files", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--buffer", type=int, required=True)
    parser.add_argument("--save-steps", type=int, required=True)
    parser.add_argument("--fit-steps", type=int, default=0, help="train with hk.fit, for so many steps")
    parser.add_argument("--profile", help="HVDKIT_PROFILE of the run")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds to rest after a step")
    args = parser.parse_args()
    if args.profile:
        os.environ["HVDKIT_PROFILE"] = args.profile
    hk.init()
    keras.utils.set_random_seed(7)
    source = hk.data.parquet(args.files)
    if args.fit_steps:
        source = source.map(lambda batch: ((batch["features"], batch["items"]), batch["label"]))
    batches = hk.data.GlobalBatches(
        source,
        args.batch,
        shuffle_seed=1,
        shuffle="blocks",
        shuffle_buffer=args.buffer,
        epochs=1,
        as_tensors=not args.fit_steps,
    )
    model = clicks()
    meter = Meter()
    if args.fit_steps:
        model.compile(keras.optimizers.SGD(0.05), keras.losses.BinaryCrossentropy(from_logits=True))
        hk.fit(model, batches, steps_per_epoch=args.fit_steps, verbose=0)
        found: dict[str, Any] = meter.figures([0.0])
    else:
        found = train(model, batches, meter, args)
    weights = [array for layer in model.layers for array in layer.get_weights()]  # with the unsharded table
    found["digest"] = hashlib.sha256(b"".join(array.tobytes() for array in weights)).hexdigest()[:16]
    if hk.is_chief():
        np.savez(args.logdir / "weights.npz", *weights)
    results = hk.allgather_object(found)
    if hk.is_chief():
        print("result " + json.dumps(results), flush=True)


def clicks() -> keras.Model:
    """Return the model: a table of items, two hidden layers and a logit."""
    features = keras.Input((FEATURES,))
    items = keras.Input((None,), dtype="int32", ragged=True)
    liked = hk.layers.ShardedEmbedding(ITEMS, WIDTH, combiner="sum", seed=5)(items)
    hidden = layers.Concatenate()([features, liked])
    for _ in range(2):
        hidden = layers.Dense(HIDDEN, "gelu")(hidden)
    return keras.Model([features, items], layers.Flatten()(layers.Dense(1)(hidden)))


def train(model: keras.Model, batches: Any, meter: Meter, args: argparse.Namespace) -> dict[str, Any]:
    """Train under a Supervisor; return the figures of the input."""
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.05))
    optimizer.build(model.trainable_variables)

    @tf.function
    def train_step(features: Any, items: Any, labels: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model([features, items], training=True)[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(losses * weights)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    first = batches.local_rows[0]
    ids = np.load(args.logdir / f"ids-{hk.size()}.npy", mmap_mode="r+")  # written by all ranks
    waits: list[float] = []
    losses: list[tuple[int, float]] = []
    with hk.Supervisor(
        args.logdir, model=model, optimizer=optimizer, data=batches, save_steps=args.save_steps, summary_steps=10**9
    ) as sv:
        begun = sv.global_step
        meter.start()
        source = sv.batches()
        while True:
            asked = time.perf_counter()
            batch = next(source, None)
            waits.append(time.perf_counter() - asked)
            if batch is None:
                break
            ids[sv.global_step, first : first + batches.count] = batch["id"].numpy()[: batches.count]
            loss = train_step(batch["features"], batch["items"], batch["label"], batches.sample_weight)
            sv.step(loss=loss)
            if sv.global_step % args.save_steps == 0:
                losses.append((sv.global_step, float(hk.allreduce(loss))))
                meter.sample()
            time.sleep(args.rest)
        figures = meter.figures(waits[:-1])
    return {"from": begun, "to": sv.global_step, "losses": losses, **figures}


class Meter:
    """Measures bytes read, memory, and processor time of this process and of its reading threads."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Measure from here on."""
        self._threads: dict[int, float] = {}
        self._began, self._cpu, self._read = time.perf_counter(), time.process_time(), bytes_read()
        self._memory = memory("VmRSS")

    def sample(self) -> None:
        """Note the processor time of the threads that read."""
        for thread in threading.enumerate():
            if thread.name.startswith("hvdkit-read") and thread.native_id is not None:
                self._threads[thread.native_id] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    def figures(self, waits: list[float]) -> dict[str, Any]:
        """Return the figures since the start; ``waits`` are the seconds that each step waited for its batch."""
        seconds = time.perf_counter() - self._began
        later = waits[1:] or waits
        return {
            "seconds": seconds,
            "steps": len(waits),
            "first_wait": waits[0],
            "wait": sum(waits),
            "median_wait": float(np.median(later)),
            "p99_wait": float(np.quantile(later, 0.99)),
            "longest_wait": max(later),
            "read": bytes_read() - self._read,
            "reading_cpu": sum(self._threads.values()),
            "cpu": time.process_time() - self._cpu,
            "memory_before": self._memory,
            "memory_peak": memory("VmHWM"),
        }


def bytes_read() -> int:
    """Return the number of bytes that this process has read, from files and everything else."""
    return int(Path("/proc/self/io").read_text().split()[1])


def memory(entry: str) -> int:
    """Return an entry of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{entry}:")[2].split()[0])


if __name__ == "__main__":
    main()
