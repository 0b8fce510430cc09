"""The two-convolution network of TensorFlow's CIFAR-10 tutorial, over any number of ranks.

Network, weight decay, distorted inputs, staircase decay and moving average are the tutorial's ("Convolutional Neural
Networks", ``cifar10.py`` and ``cifar10_input.py``). Instead of towers and averaging on the CPU,
each rank is one process with one device, and a ring allreduce averages the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import hvdkit as hk  # before keras: a launched rank must load TensorFlow and MPI in this order

# isort: split
import keras
import tensorflow as tf
from inputs import (
    Dataset,
    ImageFiles,
    distorted_inputs,
    evaluation_inputs,
    image_files,
    load_cifar10,
    load_digits,
    synthetic_images,
)

from hvdkit.errors import describe

MOVING_AVERAGE_DECAY = 0.9999
DENSE_WEIGHT_DECAY = 0.004


@dataclass(frozen=True, kw_only=True)
class Config:
    """Train the CIFAR-10 tutorial's network."""

    data: Literal["auto", "digits", "cifar10", "synthetic", "tfrecord"] = "auto"
    """Images: scikit-learn's digits, generated, or in --data-dir: CIFAR-10's binary files, or TFRecord files. auto:
    those in --data-dir if it is given, else digits."""
    data_dir: Path | None = None
    """Folder with CIFAR-10's binary files (data_batch_1.bin ... test_batch.bin), or with train-*.tfrecord and
    test-*.tfrecord, of which each rank reads its own rows only."""
    form: Literal["loop", "fit"] = "loop"
    """How to train: a hand-written loop, or Keras's fit."""
    steps: int = 300
    """Steps to train."""
    batch_size: int = 128
    """Examples per step, over all ranks."""
    per_rank_batch_size: int | None = None
    """Examples per step on each rank, instead of --batch-size: more ranks then mean a larger global batch."""
    learning_rate: float = 0.1
    """Learning rate for a global batch of 128; it is scaled with the global batch, and warmed up."""
    warmup_steps: int = 50
    """Steps of warm-up until the scaled learning rate is reached."""
    decay_steps: int = 100_000
    """Steps after which the learning rate falls to a tenth, as a staircase."""
    accumulate_steps: int = 1
    """Steps whose gradients are accumulated before they are averaged over ranks and applied."""
    compression: Literal["fp16", "bf16"] | None = None
    """Send gradients in 16 bits."""
    seed: int = 0
    """Seed of the initial weights, the order of examples and their distortion."""
    log_every: int = 10
    """Steps between two log lines."""
    logdir: Path | None = None
    """Save here, and continue from the newest checkpoint in it; TensorBoard's summaries as well. Default: a folder that
    is removed at the end."""
    save_model_secs: float = 600
    """Seconds between two checkpoints."""
    max_to_keep: int = 5
    """Checkpoints to keep."""
    allow_nonfinite: bool = False
    """Continue training if the loss becomes NaN or infinite."""

    def global_batch_size(self) -> int:
        """Return the number of examples per step over all ranks."""
        return self.batch_size if self.per_rank_batch_size is None else self.per_rank_batch_size * hk.size()

    def load(self) -> Dataset | ImageFiles:
        """Return the images."""
        name = self.data
        if name == "auto" and self.data_dir is not None:
            name = "tfrecord" if any(self.data_dir.glob("*.tfrecord")) else "cifar10"
        if name in ("cifar10", "tfrecord"):
            if self.data_dir is None:
                expected = f"the folder with the files of {name}"
                raise ValueError(describe("--data-dir", "nothing", expected, "pass it, or --data digits"))
            return load_cifar10(self.data_dir) if name == "cifar10" else image_files(self.data_dir)
        return synthetic_images(seed=self.seed) if name == "synthetic" else load_digits()

    def build(self, data: Dataset | ImageFiles) -> keras.Model:
        """Return the model, from raw images to logits."""
        keras.utils.set_random_seed(self.seed)
        distort = Distorted(data, self.global_batch_size(), self.seed)
        return keras.Sequential([keras.Input(data.shape, dtype="uint8"), distort, *network(data.classes)])

    def optimizer(self) -> keras.optimizers.Optimizer:
        """Return SGD with the tutorial's staircase decay, with the rate scaled for the global batch."""
        decay = keras.optimizers.schedules.ExponentialDecay(self.learning_rate, self.decay_steps, 0.1, staircase=True)
        rate = hk.schedules.Warmup(decay, scale=self.global_batch_size() / 128, steps=self.warmup_steps)
        return hk.DistributedOptimizer(
            keras.optimizers.SGD(rate), accumulate_steps=self.accumulate_steps, compression=self.compression
        )


def network(classes: int) -> list[keras.layers.Layer]:
    """Return the tutorial's layers: float32 [B, 24, 24, 3] to logits [B, classes], 1,068,298 weights for ten."""
    return [
        _convolution(bias=0.0, name="conv1"),
        keras.layers.MaxPooling2D(3, 2, padding="same", name="pool1"),
        LocalResponseNormalization(name="norm1"),
        _convolution(bias=0.1, name="conv2"),
        LocalResponseNormalization(name="norm2"),
        keras.layers.MaxPooling2D(3, 2, padding="same", name="pool2"),
        keras.layers.Flatten(),
        _dense(384, name="local3"),
        _dense(192, name="local4"),
        keras.layers.Dense(classes, kernel_initializer=_normal(1 / 192), name="softmax_linear"),
    ]


def _convolution(*, bias: float, name: str) -> keras.layers.Layer:
    start = keras.initializers.Constant(bias)
    return keras.layers.Conv2D(
        64, 5, padding="same", activation="relu", kernel_initializer=_normal(0.05), bias_initializer=start, name=name
    )


def _dense(units: int, *, name: str) -> keras.layers.Layer:
    return keras.layers.Dense(
        units,
        activation="relu",
        kernel_initializer=_normal(0.04),
        bias_initializer=keras.initializers.Constant(0.1),
        # The tutorial adds weight_decay * sum(w**2) / 2; Keras's L2 lacks the 1/2.
        kernel_regularizer=keras.regularizers.L2(DENSE_WEIGHT_DECAY / 2),
        name=name,
    )


def _normal(deviation: float) -> keras.initializers.Initializer:
    return keras.initializers.TruncatedNormal(stddev=deviation)


@keras.saving.register_keras_serializable(package="hvdkit_models")
class LocalResponseNormalization(keras.layers.Layer):
    """Divide by a power of the sum of squares over neighboring channels, with the tutorial's constants."""

    def call(self, x):
        """Normalize float32 [B, height, width, channels]."""
        return tf.nn.local_response_normalization(x, depth_radius=4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)


class Distorted(keras.layers.Layer):
    """Distort training images, independently of the rank that processes them; crop the center of other images.

    Counts the training steps in a variable, which is saved and restored with the model.
    """

    def __init__(self, data: Dataset | ImageFiles, global_batch_size: int, seed: int) -> None:
        super().__init__(name="distorted_inputs", trainable=False)
        self.distortion = data.distortion
        self.global_batch_size = global_batch_size
        self.first_row = hk.rank() * global_batch_size // hk.size()
        self.seed = seed
        self.step = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="step")

    def call(self, images, training=False):
        """Return float32 [L, 24, 24, 3] of uint8 [L, 32, 32, 3]."""
        if not training:
            return evaluation_inputs(images)
        seed = tf.stack([self.seed, tf.convert_to_tensor(self.step)])
        self.step.assign_add(1)
        return distorted_inputs(
            images,
            seed,
            first_row=self.first_row,
            global_batch_size=self.global_batch_size,
            distortion=self.distortion,
        )


class MovingAverage:
    """Moving average of the trained weights, with a decay that grows with the steps done.

        average = d * average + (1 - d) * weight,   d = min(decay, (1 + step) / (10 + step))

    Source: ``tf.train.ExponentialMovingAverage(decay, num_updates=step)``, as the tutorial evaluates its weights.
    """

    def __init__(self, model: keras.Model, decay: float = MOVING_AVERAGE_DECAY) -> None:
        self.weights = model.trainable_variables
        self.averages = [tf.Variable(w, trainable=False) for w in self.weights]
        self.decay = decay

    @tf.function
    def update(self, step):
        """Update the averages with the weights after ``step`` steps, an int64 scalar tensor."""
        count = tf.cast(step, tf.float32)
        decay = tf.minimum(self.decay, (1.0 + count) / (10.0 + count))
        for average, weight in zip(self.averages, self.weights, strict=True):
            average.assign_sub((1.0 - decay) * (average - weight))

    def swap(self) -> None:
        """Exchange the model's weights and their averages, before and after an evaluation."""
        for average, weight in zip(self.averages, self.weights, strict=True):
            kept = tf.convert_to_tensor(weight)
            weight.assign(average)
            average.assign(kept)
