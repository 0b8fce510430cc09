"""One rank of proofs/resume.py: train under a Supervisor, log the losses, and print a digest of the weights."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import hvdkit as hk

# isort: split
import keras
import numpy as np
import tensorflow as tf

GLOBAL_BATCH = 48


def main() -> None:
    """Train up to step ``--steps``, continuing from the last save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logdir", type=Path)
    parser.add_argument("--steps", type=int, default=390)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--rest", type=float, default=0.04, help="seconds to rest after a step")
    args = parser.parse_args()
    hk.init()
    keras.utils.set_random_seed(hk.rank())
    batches, model, optimizer, train_step = workload(args.dropout)
    with hk.Supervisor(
        args.logdir, model=model, optimizer=optimizer, data=batches, save_steps=args.save_steps, summary_steps=10
    ) as sv:
        for x, y in sv.batches():
            if sv.global_step >= args.steps:
                break
            loss = hk.allreduce(train_step(x, y, batches.sample_weight))
            sv.step(loss=loss)
            if hk.is_chief():
                with (args.logdir / "losses.jsonl").open("a") as log:
                    log.write(json.dumps([sv.global_step, float(loss), hk.size()]) + "\n")
            time.sleep(args.rest)
    digests = hk.allgather_object(digest([*model.variables, *optimizer.variables]))
    if hk.is_chief():
        print("result", json.dumps(digests), flush=True)


def workload(dropout: float):
    """Return data, model, optimizer and step, with every kind of state that a run can have.

    Each rank draws different dropout masks and keeps different moving statistics; gradients are accumulated over three
    steps; the learning rate decays by step.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32)[..., None], digits.target.astype(np.int32)
    batches = hk.data.GlobalBatches((images, labels), GLOBAL_BATCH, shuffle_seed=0)
    layers = [keras.layers.Conv2D(8, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(32, "relu")]
    if dropout:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(dropout)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10)])
    rate = keras.optimizers.schedules.ExponentialDecay(0.003, 50, 0.9)
    optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(rate), accumulate_steps=3)

    @tf.function
    def train_step(x, y, sample_weight):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x, training=True))
            loss = tf.reduce_mean(losses * sample_weight)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return batches, model, optimizer, train_step


def digest(variables) -> str:
    """Return a digest of the values of ``variables``."""
    return hashlib.sha256(b"".join(np.asarray(v.value).tobytes() for v in variables)).hexdigest()[:12]


if __name__ == "__main__":
    main()
