"""A click model based on DLRM: sharded embeddings of categorical features, their interactions, and two small networks.

Naumov et al., "Deep learning recommendation model for personalization and recommendation systems", arXiv:1906.00091.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import hvdkit as hk  # before keras: a launched rank must load TensorFlow and MPI in this order

# isort: split
import keras
import tensorflow as tf
from console import say
from inputs import ClickFiles, Clicks, click_files, load_criteo, load_movielens, planted_clicks
from training import folder


@dataclass(frozen=True, kw_only=True)
class Config:
    """Predict clicks from categorical features, each with an embedding table sharded across the ranks."""

    data: Literal["planted", "criteo", "movielens"] = "planted"
    """Generated examples with a known best loss, Criteo's TSV files, or MovieLens's ratings.csv."""
    data_file: Path | None = None
    """File to read whole, for criteo and movielens."""
    data_dir: str | None = None
    """Folder (or URL) with Parquet files or Criteo's click logs, instead of --data: each rank reads its own rows only.
    The last file is held out. Columns: label, floats, ids and lists of ids; see models/inputs/click_files.py."""
    rows: int = 5000
    """Rows of each table (planted, criteo, files); ids are taken modulo this."""
    examples: int = 120_000
    """Number of examples to generate, or the maximum to read from --data-file."""
    width: int = 4
    """Width of an embedding."""
    epochs: int = 6
    """Passes over the data."""
    max_steps: int | None = None
    """Steps after which to stop and save, counted over all runs. Default: the end of the last epoch."""
    batch_size: int = 500
    """Examples per step, over all ranks."""
    optimizer: Literal["sgd", "adagrad", "adam"] = "adagrad"
    """Optimizer of tables and networks."""
    learning_rate: float = 0.2
    """Learning rate of the optimizer."""
    seed: int = 0
    """Seed of the data, their order and the initial weights."""
    logdir: Path | None = None
    """Save here, and continue from the newest checkpoint in it. Default: a folder that is removed at the end."""

    def load(self) -> Clicks | ClickFiles:
        """Return the examples."""
        if self.data_dir is not None:
            return click_files(self.data_dir, rows=self.rows)
        if self.data == "planted":
            return planted_clicks(self.examples, rows=self.rows, seed=self.seed)
        if self.data_file is None:
            raise ValueError(f"--data-file: got none, expected the {self.data} file; pass its path")
        if self.data == "criteo":
            return load_criteo(self.data_file, rows=self.rows, limit=self.examples)
        return load_movielens(self.data_file)


class Recommender(keras.Model):
    """Logits of a click from numbers ``[batch, d]``, ids ``[batch, f]`` and ragged lists of ids.

    Every pair of the embeddings (of a list: their mean) and the vector of the numbers interacts by its dot product.

    Args:
        rows: number of rows of the table of each column of ids.
        width: width of an embedding.
        seed: seed of the tables.
        lists: number of rows of the table of each list.
    """

    def __init__(self, rows: tuple[int, ...], width: int, seed: int, lists: Mapping[str, int] = MappingProxyType({})):
        super().__init__()
        normal = keras.initializers.RandomNormal(stddev=0.05)
        tables = [hk.layers.Table(f"c{i}", n, width, initializer=normal) for i, n in enumerate(rows)]
        tables += [hk.layers.Table(f"list_{i}", n, width, "mean", initializer=normal) for i, n in lists.items()]
        self.embed = hk.layers.ShardedEmbeddingCollection(tables, seed=seed)
        self.bottom = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(width)])
        self.top = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])

    def call(self, inputs):
        """Return logits ``[batch, 1]``."""
        ids = inputs["ids"]
        lists = {f"list_{name}": each for name, each in inputs.get("lists", {}).items()}
        found = self.embed({f"c{i}": ids[:, i] for i in range(ids.shape[1])} | lists)
        numbers = self.bottom(inputs["dense"])
        vectors = tf.stack([numbers, *found.values()], axis=1)
        count = vectors.shape[1]
        products = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), [-1, count * count])
        pairs = [row * count + column for row in range(count) for column in range(row)]
        flat = tf.reshape(vectors, [-1, count * vectors.shape[2]])
        return self.top(tf.concat([flat, tf.gather(products, pairs, axis=1)], axis=1))


def run(config: Config) -> tuple[float, float]:
    """Train over all ranks; return the held-out loss and AUC, over all ranks' examples."""
    data = config.load()
    keras.utils.set_random_seed(config.seed)
    model = Recommender(data.rows, config.width, config.seed, dict.fromkeys(data.lists, config.rows))
    batches = hk.data.GlobalBatches(
        data.part(False),
        config.batch_size,
        shuffle_seed=config.seed,
        shuffle=data.shuffle,
        epochs=config.epochs,
        remainder="drop",
        as_tensors=True,
    )
    model(data.example)
    optimizer = hk.DistributedOptimizer(keras.optimizers.get(
        {"class_name": config.optimizer, "config": {"learning_rate": config.learning_rate}}
    ))  # fmt: skip
    say(f"{data.name}: {data.examples} examples, {len(data.rows) + len(data.lists)} tables\n{model.embed.plan}")

    @tf.function(reduce_retracing=True)
    def train_step(inputs, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, model(inputs)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    log = hk.callbacks.StepLog(config.batch_size, every=50)
    with (
        folder(config.logdir) as logdir,
        hk.Supervisor(
            logdir, model=model, optimizer=optimizer, data=batches, gather=config.logdir is None, save_model_secs=60
        ) as sv,
    ):
        for inputs, labels in sv.batches(until=config.max_steps):
            loss = train_step(inputs, labels)
            sv.step(loss=loss)
            log.step(sv.global_step, loss)
    return evaluate(model, data)


def evaluate(model: Recommender, data: Clicks | ClickFiles) -> tuple[float, float]:
    """Return the loss and the AUC of the held-out examples, of which every rank evaluates a part."""
    batches = hk.data.GlobalBatches(data.part(True), 2000, shuffle=data.shuffle, epochs=1)
    loss, area = keras.metrics.BinaryCrossentropy(from_logits=True), keras.metrics.AUC(2000, from_logits=True)
    for inputs, labels in batches:
        logits = model(inputs)
        for metric in (loss, area):
            metric.update_state(labels, logits, sample_weight=batches.sample_weight)
    for variable in (*loss.variables, *area.variables):  # sums over examples, so they can be summed over ranks
        variable.assign(hk.allreduce(variable.value, hk.Sum))
    result = float(loss.result()), float(area.result())
    best = "" if data.best is None else f" (best reachable {data.best[0]:.4f}, {data.best[1]:.4f})"
    say(f"held-out loss {result[0]:.4f}, AUC {result[1]:.4f}{best} on {data.held_out} examples")
    return result
