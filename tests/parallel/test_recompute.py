"""Collectives in functions that ``tf.recompute_grad`` runs again in the backward pass give the same numbers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit as hk

layers = keras.layers
W = np.random.default_rng(1).normal(size=(4, 4)).astype("float32")
COLLECTIVES = {
    "allreduce": lambda v: hk.allreduce(tf.sin(v), hk.Sum),
    "max": lambda v: hk.allreduce(tf.sin(v), hk.Max),
    "two": lambda v: hk.allreduce(tf.sin(hk.allreduce(tf.sin(v), hk.Sum)), hk.Average),
    "allgather": lambda v: tf.reduce_sum(tf.reshape(hk.allgather(tf.sin(v)), [hk.size(), 4, 4]), 0),
    "alltoall": lambda v: hk.alltoall(tf.sin(tf.tile(v, [hk.size(), 1])))[0][:4],
    "reducescatter": lambda v: hk.reducescatter(tf.tile(tf.sin(v), [hk.size(), 1]), hk.Sum),
    "broadcast": lambda v: hk.broadcast(tf.sin(v), hk.size() - 1),
}


def gradients(function, depth):
    """Return loss and gradients of ``depth`` applications of ``function``, in a graph, in the last of three steps."""
    x = tf.constant(np.random.default_rng(hk.rank()).normal(size=(4, 4)).astype("float32"))
    w = tf.Variable(W)

    @tf.function
    def step(v):
        with tf.GradientTape() as tape:
            tape.watch(v)
            y = v
            for _ in range(depth):
                y = function(y) @ w / 4
            loss = tf.reduce_sum(y**2)
        return loss, *tape.gradient(loss, [v, w])

    return [step(x) for _ in range(3)][-1]


@pytest.mark.parametrize("inner", ["plain", "tf.function"])
def test_collectives_that_are_recomputed(inner):
    for name, function in COLLECTIVES.items():
        expected = gradients(function, 2)
        recomputed = tf.recompute_grad(function if inner == "plain" else tf.function(function))
        for one, other in zip(gradients(recomputed, 2), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, err_msg=name)


class Recomputed(layers.Layer):
    """Another layer, whose activations are computed again in the backward pass."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return keras.remat(self.inner)(x)


def inner_layer(kind):
    if kind == "BatchNormalization":
        return layers.BatchNormalization(synchronized=True)
    if kind == "ShardedEmbedding":
        return hk.layers.ShardedEmbedding(9, 4, seed=1)
    return hk.layers.ColumnParallelDense(4, seed=1)


@pytest.mark.parametrize("kind", ["BatchNormalization", "ShardedEmbedding", "ColumnParallelDense"])
def test_layers_that_are_recomputed(rng, kind):
    ids = rng.integers(0, 9, (16, 3))
    x = ids if kind == "ShardedEmbedding" else rng.normal(size=(16, 4)).astype("float32")

    def train(wrap):
        keras.utils.set_random_seed(1)
        inputs = keras.Input(x.shape[1:], dtype=x.dtype.name)
        rows = layers.Flatten()(wrap(inner_layer(kind))(inputs))
        model = keras.Model(inputs, layers.Dense(1)(rows))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = hk.fit(model, x, np.ones((16, 1), "float32"), batch_size=8, epochs=2, shuffle=False, verbose=0)
        return history.history["loss"]

    np.testing.assert_allclose(train(Recomputed), train(lambda layer: layer), rtol=1e-5)
