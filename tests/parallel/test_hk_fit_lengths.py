"""Batches whose tensors differ in length: every row reaches one rank, or an error names the tensors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import compare, raises_on_several

import hvdkit as hk

layers = keras.layers


class SemiSupervised(keras.Model):
    """Learns from labelled rows, from more rows without labels, and from a small table that all rows use."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(2)

    def call(self, x):
        return self.hidden(x)

    def train_step(self, data):
        (x, y), unlabelled, table = data
        with tf.GradientTape() as tape:
            supervised = tf.reduce_mean((self(x) - y) ** 2)
            distances = tf.reduce_sum((self(unlabelled)[:, None] - table) ** 2, axis=-1)
            loss = supervised + 0.1 * tf.reduce_mean(tf.reduce_min(distances, axis=1))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"table": tf.reduce_sum(table)}


def semi_supervised():
    model = SemiSupervised()
    model.compile(keras.optimizers.SGD(0.05))
    return model


def zipped(rng, labelled=None, unlabelled=None, drop_remainder=False):
    """Return batches of 2 labelled and 6 unlabelled rows for each rank, unless given, with a table."""
    labelled, unlabelled = labelled or 2 * hk.size(), unlabelled or 6 * hk.size()
    x, y = rng.normal(size=(24, 3)).astype("float32"), rng.normal(size=(24, 2)).astype("float32")
    more, table = rng.normal(size=(72, 3)).astype("float32"), rng.normal(size=(6, 2)).astype("float32")
    parts = [
        tf.data.Dataset.from_tensor_slices((x, y)).batch(labelled, drop_remainder=drop_remainder),
        tf.data.Dataset.from_tensor_slices(more).batch(unlabelled, drop_remainder=drop_remainder),
        tf.data.Dataset.from_tensors(table).repeat(),
    ]
    return tf.data.Dataset.zip(*parts)


PARTS = ("rows", "rows", "whole")


@pytest.mark.core
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_lengths_that_differ_are_refused_or_declared(rng, drop_remainder, size):
    words = rf"{2 * size} in batch\[0\]\[0\].* {6 * size} in batch\[1\], 6 in batch\[2\].*hk.data.divide"
    with raises_on_several(ValueError, words):
        hk.fit(semi_supervised(), zipped(rng, drop_remainder=drop_remainder), verbose=0)
    seed = int(rng.integers(1000))

    def make_data():
        return hk.data.divide(zipped(np.random.default_rng(seed), drop_remainder=drop_remainder), PARTS)

    compare(semi_supervised, make_data, epochs=2)
    if size > 1:
        uneven = hk.data.divide(zipped(rng, size + 1, 3 * size, drop_remainder), PARTS)
        with pytest.raises(ValueError, match=rf"{size + 1} in batch\[0\]\[0\].*{size}, divides"):
            hk.fit(semi_supervised(), uneven, verbose=0)


def test_every_rank_gets_its_rows_and_the_whole_table(rng, rank, size):
    seen = []

    class Notes(keras.Model):
        def train_step(self, data):
            if not tf.is_symbolic_tensor(data[0]):
                seen.append([x.numpy().tolist() for x in data])
            return {"rows": tf.shape(data[0])[0]}

    model = Notes()
    model.compile("sgd", run_eagerly=True)
    numbers = [tf.range(n * size)[None] for n in (2, 6)]
    data = tf.data.Dataset.from_tensor_slices((*numbers, tf.range(5)[None]))
    hk.fit(model, hk.data.divide(data, PARTS), verbose=0)
    assert seen[-1] == [
        list(range(2 * rank, 2 * rank + 2)),
        list(range(6 * rank, 6 * rank + 6)),
        list(range(5)),
    ]


@pytest.mark.nightly
def test_a_batch_of_graphs_is_explained(rng):
    """Atoms, the molecule of each atom, and one label for each molecule, as Keras's examples build them."""

    def graphs():
        for _ in range(3):
            owners = np.repeat(np.arange(4), [3, 2, 4, 2]).astype("int32")
            yield (rng.normal(size=(len(owners), 5)).astype("float32"), owners), np.ones((4, 1), "float32")

    signature = (
        (tf.TensorSpec([None, 5]), tf.TensorSpec([None], tf.int32)),
        tf.TensorSpec([None, 1]),
    )
    dataset = tf.data.Dataset.from_generator(graphs, output_signature=signature)
    atoms, owners = keras.Input((5,)), keras.Input((), dtype="int32")
    pooled = layers.Lambda(lambda pair: tf.math.segment_sum(*pair), output_shape=(5,))([atoms, owners])
    model = keras.Model([atoms, owners], layers.Dense(1)(pooled))
    model.compile("sgd", "mse")
    words = r"11 in batch\[0\]\[0\], 11 in batch\[0\]\[1\], 4 in batch\[1\].*graphs.*RaggedTensors"
    for call in (hk.fit, hk.evaluate):
        with raises_on_several(ValueError, words):
            call(model, dataset, verbose=0)


def test_a_declaration_with_another_structure_is_an_error(rng):
    for parts, words in [
        (("rows", "rows"), r"without a part for batch\[2\]"),
        ((("rows", "rows", "rows"), "rows", "whole"), None),
        (("rows", ("rows", "rows"), "whole"), "which is a tensor"),
    ]:
        data = hk.data.divide(zipped(rng), parts)
        if words is not None:
            with pytest.raises(ValueError, match=words):
                hk.fit(semi_supervised(), data, verbose=0)
    with pytest.raises(ValueError, match="parts: got 'half'"):
        hk.data.divide(zipped(rng), "half")
    with pytest.raises(TypeError, match="data: got ndarray"):
        hk.data.divide(np.ones(3), "rows")


def test_a_dataset_without_batches_is_told_to_make_them():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((np.ones((40, 8), "float32"), np.ones((40, 1), "float32")))
    with raises_on_several(ValueError, r"8 in batch\[0\], 1 in batch\[1\].*pass dataset.batch\(batch_size\)"):
        hk.fit(model, rows, verbose=0)
