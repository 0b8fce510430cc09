"""One rank of proofs/many_ranks.py: a Keras model with a sharded embedding under a Supervisor."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import hvdkit as hk

# isort: split
import keras
import numpy as np
import tensorflow as tf

GLOBAL_BATCH, IDS, WIDTH, EXAMPLES = 96, 5000, 8, 4800


def main() -> None:
    """Train up to step ``--steps``, continuing from the last save; rank 0 prints sums and digests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logdir", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=10)
    args = parser.parse_args()
    hk.init()
    keras.utils.set_random_seed(7)
    chance = np.random.default_rng(7)
    ids = chance.integers(0, IDS, (EXAMPLES, 4)).astype(np.int64)
    labels = (ids.sum(1, keepdims=True) % 7 / 7).astype(np.float32)
    batches = hk.data.GlobalBatches((ids, labels), GLOBAL_BATCH, shuffle_seed=3)
    inputs = keras.Input((4,), dtype="int64")
    embedding = hk.layers.ShardedEmbedding(IDS, WIDTH, seed=5)
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Flatten()(embedding(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(0.01))
    optimizer.build(model.trainable_variables)

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    loss, begun = tf.constant(0.0), None
    with hk.Supervisor(
        args.logdir, model=model, optimizer=optimizer, data=batches, save_steps=args.save_steps, summary_steps=1000
    ) as sv:
        begun = sv.global_step
        for x, y in sv.batches():
            if sv.global_step >= args.steps:
                break
            loss = hk.allreduce(train_step(x, y))
            sv.step(loss=loss)
    # Sums over all ranks' parts: on another number of ranks they are equal up to rounding.
    own = [np.asarray(v) for v in model.trainable_variables]
    dense = [v for v in own if v.shape[:1] != np.asarray(model.trainable_variables[0]).shape[:1]]
    table = own[0].astype(np.float64)
    sums = [float(np.abs(v.astype(np.float64)).sum()) for v in dense]
    sums.append(float(hk.allreduce(np.float64(np.abs(table).sum()), op=hk.Sum)))
    mine = hashlib.sha256(b"".join(v.tobytes() for v in own)).hexdigest()
    digests = hk.allgather_object(mine)
    if hk.is_chief():
        found = {"loss": float(loss), "from": begun, "weights": sums, "digest": digests}
        print("result " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
