"""State that a layer or train_step updates from its batch: as in one process, or an error that names it."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import compare, line, mine, raises_on_several

import hvdkit as hk
from hvdkit.cluster.logs import warn_once

layers = keras.layers


class Running(layers.Layer):
    """A layer with a running mean of its inputs, a count of rows, and the first row, in variables of two kinds."""

    def __init__(self, declared, untracked=False, keeps_first=False):
        super().__init__()
        self.declared, self.is_untracked, self.keeps_first = declared, untracked, keeps_first

    def build(self, shape):
        if self.is_untracked:
            self.mean = tf.Variable(tf.random.normal(shape[1:]), trainable=False)
        else:
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")
        self.rows = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="rows")
        self.first = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="first")
        if self.declared:
            hk.synchronize(self.mean, "mean")
            hk.synchronize([self.rows], "sum")
            hk.synchronize(self.first, "chief")

    def call(self, x, training=False):
        centred = x - tf.convert_to_tensor(self.mean)
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, axis=0))
            self.rows.assign_add(tf.shape(x)[0])
            self.first.assign(x[0] if self.keeps_first else self.first)
        return centred


class UpdatedFirst(layers.Layer):
    """A layer that subtracts a running mean which includes the rows of the same batch."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")
        hk.synchronize(self.mean, "mean")

    def mean_of(self, x):
        return tf.reduce_mean(x, axis=0)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * self.mean_of(x))
        return x - self.mean


class UpdatedFirstFromAllRows(UpdatedFirst):
    """The same layer, with the sums of the global batch."""

    def mean_of(self, x):
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        total, count = hk.grouped_allreduce([tf.reduce_sum(x, axis=0), rows], op=hk.Sum)
        return total / count


class UpdatedForALog(UpdatedFirst):
    """A layer that reads its running mean after the update for a metric only."""

    def __init__(self):
        super().__init__()
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x, training=False):
        centred = x - self.mean
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * self.mean_of(x))
            self.norm.update_state(tf.norm(self.mean))
        return centred


def model_with(layer, optimizer="sgd", **options):
    model = keras.Sequential([keras.Input((3,)), layer, layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    return model


@pytest.mark.nightly(3)
@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
def test_declared_state_is_that_of_one_process(rng):
    """Uneven shares, and with a last batch of one row also empty ones; the count is exact."""
    x, y = line(rng, 25)
    for options in ({}, {"run_eagerly": True}):
        _, many = compare(lambda options=options: model_with(Running(True), **options), x, y, batch_size=8, epochs=2)
        assert int(many.layers[0].rows) == 50
    compare(lambda: model_with(Running(True, keeps_first=True)), *line(rng, 24), batch_size=8)


@pytest.mark.nightly(1)
@pytest.mark.ranks(1, 2)
def test_declared_state_that_is_read_after_its_update_gets_a_warning(rng, rank, size, caplog, monkeypatch):
    """What the layer reads is the state of its rank's rows, unless the layer combines the sums of the batch itself."""
    monkeypatch.setattr(logging.getLogger("hvdkit"), "propagate", True)
    x, y = line(rng, 24)
    warned = {}
    for layer in (UpdatedFirst, UpdatedFirstFromAllRows, UpdatedForALog, lambda: Running(True)):
        warn_once.cache_clear()
        caplog.clear()
        made = layer()
        hk.fit(model_with(made), x, y, batch_size=12, verbose=0)
        warned[type(made)] = any("mean: read after its update in the same step" in text for text in caplog.messages)
    several = rank == 0 and size > 1
    data = line(rng, 25)  # uneven shares
    compare(lambda: model_with(UpdatedFirstFromAllRows()), *data, on_each_rank=True, batch_size=8, epochs=2)
    assert warned == {UpdatedFirst: several, UpdatedFirstFromAllRows: False, UpdatedForALog: False, Running: False}


@pytest.mark.core
def test_undeclared_state_is_an_error_on_every_rank(rng):
    x, y = line(rng, 24)
    for untracked, name in ((False, "running.*/mean"), (True, r"running.*\.mean")):
        words = rf"different values of .*{name}.*hk.synchronize.*hk.allreduce.*hk.register_local_variables"
        with raises_on_several(hk.CollectiveMismatchError, words):
            hk.fit(model_with(Running(False, untracked)), x, y, batch_size=8, verbose=0)


def test_undeclared_state_is_an_error_in_plain_fit(rng, rank, size):
    x, y = (mine(array, rank, size) for array in line(rng, 24))
    model = model_with(Running(False), hk.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with raises_on_several(hk.CollectiveMismatchError, "different values of .*use hk.fit, and .*hk.synchronize"):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[hk.callbacks.BroadcastInitial()])


def test_variables_without_keras_start_with_the_chiefs_values(rng):
    class Projection(layers.Layer):
        def __init__(self):
            super().__init__()
            self.parts = {"kernel": [tf.Variable(tf.random.normal((3, 3)))]}

        def call(self, x):
            return tf.matmul(x, self.parts["kernel"][0])

    x, y = line(rng, 24)
    model = model_with(Projection())
    hk.fit(model, x, y, batch_size=8, verbose=0)
    hk.compare_variables([model.layers[0].parts["kernel"][0]])


def test_constants_that_differ_are_an_error_on_every_rank(rng, rank):
    """Programs without a seed: a random mask, statistics of a random sample, a vocabulary of a random sample."""
    own = np.random.default_rng(rank)

    class Mask(layers.Layer):
        def __init__(self):
            super().__init__(name="mask")
            self.used = keras.ops.convert_to_tensor(np.eye(3)[own.choice(3, 4)], "float32")

        def call(self, x):
            return keras.ops.matmul(x, keras.ops.transpose(self.used))

    class Numbers(layers.Layer):
        def __init__(self):
            super().__init__(name="numbers")
            self.parts = [{"scale": own.normal(size=3).astype("float32")}]

        def call(self, x):
            return x * self.parts[0]["scale"]

    normalization = layers.Normalization(name="normalization")
    normalization.adapt(rng.normal(size=(100, 3))[own.choice(100, 5)])
    words = layers.StringLookup(name="words")
    words.adapt(own.choice(1000, 5).astype(str))
    x, y = line(np.random.default_rng(1), 24)
    for layer, name in (
        (Mask(), "another used of layer 'mask'"),
        (Numbers(), r"another parts\[0\]\['scale'\] of layer 'numbers'"),
        (normalization, "another mean of layer 'normalization'"),
    ):
        with raises_on_several(hk.CollectiveMismatchError, f"{name}.*set_random_seed.*add_weight"):
            hk.fit(model_with(layer), x, y, batch_size=8, verbose=0)
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layers.Embedding(9, 2)(words(inputs)))))
    model.compile("sgd", "mse")
    with raises_on_several(hk.CollectiveMismatchError, "another vocabulary of layer 'words'"):
        hk.fit(model, tf.constant([["1"]] * 24), y, batch_size=8, verbose=0)
    same = model_with(layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[1.0, 1.0, 2.0]))
    hk.fit(same, x, y, batch_size=8, verbose=0)


def test_other_state_is_not_compared(rng):
    """Metrics, statistics, random generators, slots, states of rows, tables with eviction, and local variables."""

    class Tracked(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.tracker = inner, keras.metrics.Mean(name="norm")
            self.own = self.add_weight(shape=(), initializer="zeros", trainable=False, name="own")
            hk.register_local_variables(self.own)

        def call(self, inputs, training=False):
            self.tracker.update_state(tf.norm(inputs[0]))
            self.own.assign(tf.norm(inputs[0]))
            return self.inner(inputs, training=training)

    inputs = keras.Input((3,))
    x = layers.SpectralNormalization(layers.Dense(4))(layers.Dropout(0.2)(layers.BatchNormalization()(inputs)))
    ids = keras.Input((1,), dtype="int64")
    table = hk.layers.ShardedEmbedding(64, 2, evict="lru")(ids)
    inner = keras.Model([inputs, ids], layers.Dense(1)(layers.Concatenate()([x, layers.Flatten()(table)])))
    x, y = line(rng, 24)
    model = Tracked(inner)
    model.compile(keras.optimizers.Adam(amsgrad=True), "mse", metrics=["mae"])
    data = [x, rng.integers(1000, size=(24, 1))]
    hk.fit(model, data, y, batch_size=8, epochs=2, validation_split=0.25, verbose=0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_a_table_with_eviction_gets_batches_of_fewer_rows_than_ranks(rng, evict):
    ids = rng.integers(1000, size=(17, 1))
    table = hk.layers.ShardedEmbedding(64, 2, evict=evict)
    model = keras.Sequential([keras.Input((1,), dtype="int64"), table, layers.Flatten(), layers.Dense(1)])
    model.compile("adagrad", "mse")
    hk.fit(model, ids, np.ones((17, 1)), batch_size=8, epochs=2, verbose=0)
    (clock,) = (v for v in table.variables if v.path.endswith("_clock"))
    assert np.asarray(clock).tolist() == [6, 6]


def test_ranks_may_number_their_layers_differently(rng, rank):
    for _ in range(rank):
        layers.Dense(1)  # of another model, which only some ranks have
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, trainable=False), layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = line(rng, 24)
    hk.fit(model, x, y, batch_size=8, verbose=0)


def test_wrong_declarations_are_errors():
    count = tf.Variable(0)
    for variable, rule, error, words in [
        (count, "mean", ValueError, "'mean' for Variable:0 of dtype int32"),
        (count, "max", ValueError, "rule: got 'max'"),
        (np.ones(2), "sum", TypeError, "variables: got"),
        (tf.Variable("text"), "chief", ValueError, "dtype string"),
    ]:
        with pytest.raises(error, match=words):
            hk.synchronize(variable, rule)
