"""A supervised run with every kind of state."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvdkit as hk

X = np.random.default_rng(3).normal(size=(90, 6)).astype(np.float32)
Y = (X @ np.arange(6, dtype=np.float32))[:, None]


class Run:
    """Every kind of state: dropout, moving statistics, accumulation, a schedule, a generator, a counter."""

    def __init__(self, epochs: int | None = 4, units: int = 5, accumulate_steps: int = 3):
        keras.utils.set_random_seed(hk.rank())
        layers = keras.layers
        self.model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(units), layers.BatchNormalization(), layers.Dropout(0.4), layers.Dense(1)]
        )
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 7, 0.9)
        self.optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(rate), accumulate_steps=accumulate_steps)
        self.batches = hk.data.GlobalBatches((X, Y), 20, shuffle_seed=1, epochs=epochs)
        self.noise = np.random.default_rng(hk.rank())
        self.seen = tf.Variable(0, dtype=tf.int64)

        @tf.function
        def train_step(x, y, sample_weight):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.model(x, training=True) - y)[:, 0] * sample_weight)
            self.optimizer.apply(tape.gradient(loss, self.model.trainable_variables), self.model.trainable_variables)
            return loss

        self.train_step = train_step

    def supervised(self, logdir: Path, **options) -> hk.Supervisor:
        options = {"save_model_secs": None, "summary_steps": 2} | options
        kept = {"variables": [self.seen], "state": {"noise": self.noise, "lucky": 7}}
        return hk.Supervisor(logdir, model=self.model, optimizer=self.optimizer, data=self.batches, **kept, **options)

    def train(
        self, sv: hk.Supervisor, until: int | None = None, on_step: Callable[[int], None] = lambda step: None
    ) -> None:
        """Train to step ``until``, or to the end of the data; call ``on_step`` after each step."""
        for x, y in sv.batches():
            x = x + self.noise.normal(scale=0.01, size=x.shape).astype(np.float32)
            loss = self.train_step(x, y, self.batches.sample_weight)
            self.seen.assign_add(20)
            sv.step(loss=loss)
            on_step(sv.global_step)
            if sv.global_step == until:
                break

    def bits(self) -> list[bytes]:
        """Return the whole state of this rank, bit for bit."""
        variables = [*self.model.variables, *self.optimizer.variables, self.seen]
        state = json.dumps(self.noise.bit_generator.state, default=int).encode()
        return [*(tf.convert_to_tensor(v).numpy().tobytes() for v in variables), state]
