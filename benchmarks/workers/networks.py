"""The networks of benchmarks/dense.py in Keras, each with a batch of constant inputs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))

BATCH = {"cifar10": 64, "resnet50": 16, "mlp": 64}
SHAPE = {"cifar10": (24, 24, 3), "resnet50": (32, 32, 3), "mlp": (2500,)}
RATE = 0.01


def build(name: str):
    """Return a network by its name: inputs ``[B, *SHAPE[name]]`` to logits ``[B, 10]``."""
    import keras

    keras.utils.set_random_seed(0)
    if name == "resnet50":  # 23.6 million weights
        return keras.applications.ResNet50(
            weights=None, input_shape=SHAPE[name], classes=10, classifier_activation=None
        )
    if name == "mlp":  # 25.0 million weights, 100 MB
        hidden = [keras.layers.Dense(2500, "relu") for _ in range(4)]
        return keras.Sequential([keras.Input(SHAPE[name]), *hidden, keras.layers.Dense(10)])
    import cifar10  # the tutorial's, with hvdkit: import order of a launched rank matters

    return keras.Sequential([keras.Input(SHAPE[name]), *cifar10.network(10)])


def inputs(name: str):
    """Return constant inputs and labels as NumPy arrays, the same in every process."""
    import numpy as np

    rng = np.random.default_rng(0)
    batch = BATCH[name]
    return rng.normal(size=(batch, *SHAPE[name])).astype("float32"), rng.integers(0, 10, batch).astype("int32")


def workload(name: str):
    """Return the network, its loss function, and the arguments of that function."""
    import tensorflow as tf

    model = build(name)
    images, labels = (tf.constant(x) for x in inputs(name))

    def loss_of(images, labels):
        logits = model(images, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.reduce_mean(losses) + (tf.add_n(model.losses) if model.losses else 0.0)

    return model, loss_of, images, labels
