"""Ranks whose models do not compute the same function: an error that names the layer, and no trace in other models."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import compare, line, raises_on_several, same_logs

import hvdkit as hk

layers = keras.layers
SCALE = np.random.default_rng(hk.rank()).normal(size=3).astype("float32")  # a program without a seed


class ReadsGlobal(layers.Layer):
    def call(self, x):
        return x * SCALE


class HoldsNumber(layers.Layer):
    def __init__(self):
        super().__init__()
        self._rate = random.Random(hk.rank()).random()

    def call(self, x):
        return x * self._rate


class Codebook:
    def __init__(self):
        self.codes = np.random.default_rng(hk.rank()).normal(size=(3, 3)).astype("float32")


class HoldsObject(layers.Layer):
    def __init__(self):
        super().__init__()
        self.book = Codebook()

    def call(self, x):
        return x @ self.book.codes


class HoldsTable(layers.Layer):
    def __init__(self):
        super().__init__()
        values = tf.constant(np.random.default_rng(hk.rank()).normal(size=2), "float32")
        initializer = tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1], tf.int64), values)
        self.table = tf.lookup.StaticHashTable(initializer, 0.0)

    def call(self, x):
        return x + self.table.lookup(tf.cast(x > 0, tf.int64))


class Reader(layers.Layer):
    def call(self, x):
        return x * (hk.rank() + 1.0)


class Random(layers.Layer):
    """Random also without training, as the sampling layer of a VAE often is."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def call(self, x):
        return x + self.draw(keras.ops.shape(x))


class Drawing(layers.Layer):
    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator()

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.generator)


class Adversarial(keras.Model):
    """A model without ``call``, of two submodels."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.discriminator(self.generator(x)))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class Refusing(keras.Model):
    """A model that cannot be called with the rows of its data."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(1)
        self.calls = 0

    def call(self, x, training=None):
        self.calls += 1
        if not training:
            raise ValueError("only for training")
        return self.inner(x)


def model_with(layer, *, is_built=True):
    model = keras.Sequential([keras.Input((3,))] * is_built + [layer, layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def adversarial():
    submodels = [keras.Sequential([keras.Input((3,)), layers.Dense(3), layer]) for layer in (layers.ReLU(), scaling())]
    model = Adversarial(*submodels)
    model.compile("sgd")
    return model


def scaling():
    scale = np.float32(SCALE)
    return layers.Lambda(lambda x: x * scale, name="scaling")


@pytest.mark.core(2)
@pytest.mark.ranks(2)
def test_models_that_compute_another_function_are_an_error_before_the_first_step(rng):
    """Constants in globals, closures, numbers, objects, tables and submodels; arrays and datasets."""
    x, y = line(rng, 24)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    for build, words in (
        (lambda: model_with(ReadsGlobal()), r"'reads_global\w*' \(ReadsGlobal\).*rank 1.*another SCALE"),
        (lambda: model_with(scaling()), r"'scaling' \(Lambda\).*another scale"),
        (lambda: model_with(HoldsNumber()), "HoldsNumber.*another _rate"),
        (lambda: model_with(HoldsObject()), r"HoldsObject.*another book\.codes"),
        (lambda: model_with(HoldsTable()), "HoldsTable.*another table"),
        (lambda: model_with(Reader()), "Reader.*reads something that differs"),
        (adversarial, "Lambda.*another scale"),
    ):
        many = build is adversarial or "SCALE" in words
        for data in ({"x": x, "y": y, "batch_size": 8}, {"x": dataset})[: 1 + many]:
            model = build()
            remedy = r".*set_random_seed.*hk\.broadcast_object"
            with raises_on_several(hk.CollectiveMismatchError, words + remedy):
                hk.fit(model, **data, verbose=0)
            assert int(model.optimizer.iterations) == 0
    sequence = keras.Sequential([keras.Input((5, 3)), layers.LSTM(3), scaling(), layers.Dense(1)])
    sequence.compile("sgd", "mse")
    with raises_on_several(hk.CollectiveMismatchError, r"'scaling' \(Lambda\).*another scale"):
        hk.fit(sequence, np.ones((8, 5, 3)), np.ones((8, 1)), batch_size=8, verbose=0)
    for call in (lambda m: hk.evaluate(m, x, y, verbose=0), lambda m: hk.predict(m, x, verbose=0)):
        with raises_on_several(hk.CollectiveMismatchError, "another SCALE"):
            call(model_with(ReadsGlobal()))
    unbuilt = model_with(ReadsGlobal(), is_built=False)
    with raises_on_several(hk.CollectiveMismatchError, "another SCALE"):
        hk.fit(unbuilt, x, y, batch_size=8, epochs=2, verbose=0)
    assert int(unbuilt.optimizer.iterations) <= 1  # its first batch builds it


@pytest.mark.nightly
def test_other_models_are_not_errors(rng):
    """Random in every way, sharded, of one row, and models that cannot be called with the rows of the data."""
    x, y = line(rng, 24)
    generator = np.random.default_rng(hk.rank())
    normal = lambda shape: tf.constant(generator.normal(size=3), "float32")  # noqa: E731  # by eager calls only
    for layer in (
        Random(keras.random.normal),
        Random(tf.random.normal),
        Random(normal),
        Drawing(),
        layers.Dropout(0.5),
        layers.BatchNormalization(synchronized=True),
        hk.layers.ColumnParallelDense(4),
    ):
        hk.fit(model_with(layer), x, y, batch_size=8, verbose=0)
    ids = keras.Sequential([keras.Input((1,)), hk.layers.ShardedEmbedding(9, 2), layers.Flatten(), layers.Dense(1)])
    ids.compile("sgd", "mse")
    hk.fit(ids, np.arange(8)[:, None], np.ones((8, 1)), batch_size=8, verbose=0)
    hk.fit(model_with(layers.Dense(2)), x[:1], y[:1], batch_size=hk.size(), verbose=0)
    refusing = Refusing()
    refusing.compile("sgd", "mse")
    hk.fit(refusing, x, y, batch_size=8, verbose=0)


@pytest.mark.ranks(1, 2)
def normalized(*more, is_built=True):
    """Return a compiled model with moving statistics, which differ by rank after the first batch."""
    # A layer that tracks the mean of its inputs comes first: after a normalization it is 0 on every rank.
    hidden = [*more, layers.Dense(3, "relu"), layers.BatchNormalization(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,))] * is_built + hidden)
    model.compile("sgd", "mse")
    return model


class Tracking(layers.Layer):
    """Keeps means of its batches in a variable of Keras and in one of TensorFlow, which Keras does not track."""

    def __init__(self, *, is_declared):
        super().__init__()
        self.is_declared = is_declared

    def build(self, shape):
        self.mean = self.add_weight(shape=(), trainable=False)
        self.untracked = [tf.Variable(0.0)]
        if self.is_declared:
            hk.synchronize(self.mean, "mean")
            hk.synchronize(self.untracked[0], "chief")

    def call(self, x, training=None):
        outputs = x - self.mean - self.untracked[0]  # of earlier batches
        if training:
            self.mean.assign(keras.ops.mean(x))
            self.untracked[0].assign(tf.reduce_mean(x))
        return outputs


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self._x = x
        self._y = y

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(16 * index, 16 * index + 16)
        return self._x[rows], self._y[rows]


@pytest.mark.nightly
@pytest.mark.ranks(2, 3)
def test_state_that_depends_on_each_ranks_rows_is_not_compared(rng):
    """Data of any kind: models are compared after the first batch unless the data are arrays."""
    x, y = line(rng, 64)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    for data in (dataset, dataset.repeat(), Batches(x, y), hk.data.GlobalBatches((x, y), 16, shuffle_seed=0)):
        model = normalized()
        steps = 4 if data is not dataset and isinstance(data, tf.data.Dataset) else None
        hk.fit(model, data, epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0)
        hk.compare_variables(model.variables)
        hk.fit(normalized(Tracking(is_declared=True)), data, epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0)
    with raises_on_several(
        hk.CollectiveMismatchError, r"^model: got different values of .*; declare how ranks combine it"
    ):
        hk.fit(normalized(Tracking(is_declared=False)), dataset, verbose=0)
    with raises_on_several(hk.CollectiveMismatchError, r"^model: got other outputs of layer 'reads_global"):
        hk.fit(normalized(ReadsGlobal(), is_built=False), dataset, verbose=0)


def test_a_model_that_was_built_with_uneven_shares_is_compiled_again(rng):
    x, y = line(rng, 14)
    model = keras.Sequential([layers.Dense(4), layers.Dense(1)])
    for optimizer in ("adam", "sgd"):
        model.compile(optimizer, "mse")
        assert np.isfinite(hk.fit(model, x, y, batch_size=7, verbose=0).history["loss"]).all()


@pytest.mark.nightly
def test_nothing_remains_of_the_comparison(rng):
    """Seeds, states, attributes, losses and NumPy's generator; History and weights are those of one process."""

    class Counting(layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.total = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.calls += 1
            self.seen = x
            self.total.assign_add(1.0)
            self.add_loss(0.01 * keras.ops.mean(x))
            return x * 1.0

    x, y = line(rng, 24)
    built = []

    def build():
        keras.utils.set_random_seed(5)
        model = model_with(Counting())
        built.append(model.layers[0].calls)
        return model

    model = build()
    before = random.getstate(), np.random.get_state()[1].tolist()
    hk.fit(model, x, y, batch_size=8, shuffle=False, verbose=0)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    hk.compare_variables(model.variables)
    layer = model.layers[0]
    assert float(layer.total) == 3  # one for each step
    assert layer.calls == built[0] + 1 and tf.is_symbolic_tensor(layer.seen)  # traced once
    compare(build, x, y, batch_size=8, epochs=2)
    dropout = [layers.Dropout(0.5, seed=1), layers.Dropout(0.5, seed=1)]
    states = []
    for each, data in zip(dropout, ((x, y, 8), (tf.data.Dataset.from_tensor_slices((x, y)).batch(8),)), strict=True):
        model = model_with(each)
        hk.fit(model, *data, shuffle=False, verbose=0)
        states.append(each.seed_generator.state.numpy().tolist())
    assert states[0] == states[1]


class OfSparseRows(keras.Model):
    """Takes rows that are sparse or ragged, in a step that may run eagerly."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        rows = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x.to_tensor()
        return self.dense(tf.reshape(rows, (-1, 3)))


@pytest.mark.nightly(3)
@pytest.mark.ranks(2, 3)
def test_ranks_have_more_or_fewer_sparse_or_ragged_rows_than_the_chief(rng):
    x, y = line(rng, 12)

    def build():
        model = OfSparseRows()
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    for convert in (tf.sparse.from_dense, tf.RaggedTensor.from_tensor):
        for batch in (3, 5):
            rows = tf.data.Dataset.from_tensor_slices((convert(x * (x > 0)), y)).batch(batch)
            compare(build, rows, epochs=1)


class Outer(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("wrap", [Outer, lambda model: model], ids=["inner", "model"])
def test_shares_of_other_lengths_may_build_the_ranks_models(rng, wrap):
    """With ``drop_remainder=True``, Keras builds a Sequential for the number of rows of this rank's share."""
    batch = 16 if hk.size() == 3 else 15
    data = tf.data.Dataset.from_tensor_slices(line(rng, 2 * batch)).batch(batch, drop_remainder=True)

    def build():
        model = wrap(keras.Sequential([layers.Dense(4, "relu"), layers.Dense(1)]))
        model.compile("sgd", "mse")
        return model

    one, many = compare(build, data, epochs=2)
    for model in (one, many):
        model.compile(keras.optimizers.SGD(0.001), "mse")  # to train on at a lower rate
    np.testing.assert_allclose(hk.predict(many, data, verbose=0), one.predict(data, verbose=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hk.evaluate(many, data, verbose=0), one.evaluate(data, verbose=0), rtol=1e-4)
    history = hk.fit(many, data, epochs=1, verbose=0).history
    same_logs(history, one.fit(data, epochs=1, verbose=0).history)
