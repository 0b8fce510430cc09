"""Files with ragged columns, text and dicts in Keras's methods: N ranks equal one process, also with short batches."""

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from helpers.as_one import SEED, same_logs, same_values
from helpers.pairwise import some_at

import hvdkit as hk

hk.init()
RNG = np.random.default_rng(4)
ROWS = 50
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
ITEMS = [RNG.integers(0, 20, i % 4).tolist() for i in range(ROWS)]
WORDS = [[f"w{k % 5}" for k in range(i % 3)] for i in range(ROWS)]
SHOPS = [f"shop {i % 4}" for i in range(ROWS)]
Y = (X.sum(1) + [len(items) for items in ITEMS]).astype(np.float32)
WEIGHTS = RNG.uniform(0.5, 2, ROWS).astype(np.float32)
BLOCKS = {"shuffle_seed": 1, "shuffle": "blocks", "shuffle_buffer": 16, "interleave": 2}


@pytest.fixture
def rows(shared_path):
    """Return a function that lets the chief write the first rows, and all ranks read them."""

    def read(count=ROWS):
        if hk.is_chief():
            fixed = pa.FixedSizeListArray.from_arrays(X.ravel(), 3)
            table = pa.table({"x": fixed, "items": ITEMS, "words": WORDS, "shop": SHOPS, "y": Y, "weight": WEIGHTS})
            for number, part in enumerate(np.array_split(np.arange(count), 3)):
                pq.write_table(table.take(part), shared_path / f"{number}.parquet", row_group_size=5)
        hk.barrier()
        return hk.data.parquet(shared_path)

    return read


def inputs_of(batch):
    return {name: batch[name] for name in ("x", "items", "words", "shop")}


def labelled(batch):
    return inputs_of(batch), batch["y"]


def weighted(batch):
    return inputs_of(batch), batch["y"], batch["weight"]


class Shops(keras.Model):
    """A model of all columns; its table is sharded, or a layer of Keras."""

    def __init__(self, *, sharded):
        super().__init__()
        self.words = keras.layers.StringLookup(vocabulary=[f"w{i}" for i in range(5)])
        self.shops = keras.layers.StringLookup(vocabulary=sorted(set(SHOPS)), output_mode="one_hot")
        self.out = keras.layers.Dense(1)
        self.out.build((None, 3 + 2 + 1 + 5))
        values = np.random.default_rng(5).normal(size=(20, 2)).astype(np.float32)
        self.sharded = sharded
        if sharded:
            table = hk.layers.Table("items", 20, 2, combiner="sum")
            self.table = hk.layers.ShardedEmbeddingCollection([table])
        else:
            self.table = keras.layers.Embedding(20, 2)
            self.table.build()
        self.table.set_weights([values])

    def call(self, inputs):
        items = inputs["items"]
        if self.sharded:
            found = self.table({"items": items})["items"]
        else:
            found = tf.reduce_sum(items.with_flat_values(tf.gather(self.table.embeddings, items.flat_values)), 1)
        words = tf.cast(tf.reduce_sum(self.words(inputs["words"]), 1, keepdims=True), tf.float32)
        shops = tf.cast(self.shops(inputs["shop"]), tf.float32)
        return self.out(tf.concat([inputs["x"], found, words, shops], 1))


def compiled(*, sharded):
    keras.utils.set_random_seed(SEED)
    model = Shops(sharded=sharded)
    optimizer = keras.optimizers.SGD(0.02)
    model.compile(
        hk.DistributedOptimizer(optimizer) if sharded else optimizer, "mse", weighted_metrics=["mae"], jit_compile=False
    )
    return model


def alone(source, batch_size, **options):
    """Yield the real rows of each global batch, epoch after epoch, as one process reads them."""
    batches = hk.data.GlobalBatches(source, batch_size, rank=0, size=1, as_tensors=True, **options)
    for batch in batches:
        yield tf.nest.map_structure(lambda leaf: leaf[: batches.global_count], batch)


def same_tables(found, expected):
    same_values(found.get_weights(), expected.get_weights(), rtol=2e-4, atol=2e-5)


# Batches of 7: the last of 50 rows has one row, so that most ranks have none; that of 45 has 3.
CASES = [
    (50, weighted, BLOCKS),
    (50, labelled, {}),
    (45, labelled, {"shuffle_seed": 2}),
    (50, labelled, {**BLOCKS, "remainder": "drop"}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "function", "options"), some_at((1, 3), CASES))
def test_keras_methods_equal_one_process(rows, count, function, options):
    source = rows(count).map(function)
    batches = hk.data.GlobalBatches(source, 7, **options)
    steps = batches.steps_per_epoch
    many, one = compiled(sharded=True), compiled(sharded=False)
    found = hk.fit(many, batches, epochs=2, verbose=0).history
    expected = one.fit(alone(source, 7, **options), epochs=2, steps_per_epoch=steps, verbose=0).history
    same_logs(found, expected)
    same_tables(many, one)
    plain = compiled(sharded=True)
    plain.fit(batches.as_keras(), epochs=2, verbose=0, shuffle=False)
    same_tables(plain, one)

    expected = one.evaluate(alone(source, 7, **options), steps=steps, verbose=0, return_dict=True)
    same_logs(hk.evaluate(many, batches, verbose=0, return_dict=True), expected)
    wanted = one.predict(alone(source, 7, **options), steps=steps, verbose=0)
    np.testing.assert_allclose(hk.predict(many, batches, verbose=0), wanted, rtol=1e-3, atol=1e-4)
    unlabelled = hk.data.GlobalBatches(rows(count).map(inputs_of), 7, **options)
    np.testing.assert_allclose(hk.predict(many, unlabelled, verbose=0), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.core
def test_the_rows_of_a_loop_with_filler(rows):
    """Weights, mask and filler of ragged columns and text, as tensors."""
    options = {"shuffle_seed": 3, "as_tensors": True, "with_sample_weight": True, "epochs": 1}
    source = rows(50).map(labelled)
    batches = hk.data.GlobalBatches(source, 7, **options)
    first, last = batches.local_rows
    for whole in (each := hk.data.GlobalBatches(source, 7, rank=0, size=1, **options)):
        inputs, y, weight = next(batches)
        assert batches.global_count == each.global_count
        np.testing.assert_array_equal(batches.mask, each.mask[first:last])
        total = hk.allreduce(tf.reduce_sum(weight * y) / len(y), hk.Average)
        np.testing.assert_allclose(total, np.mean(whole[1][: each.global_count]), rtol=1e-5)
        for name in ("items", "words"):
            assert isinstance(inputs[name], tf.RaggedTensor)
            assert inputs[name].to_list() == whole[0][name][first:last].to_list()
        np.testing.assert_array_equal(inputs["shop"], whole[0]["shop"][first:last])
    assert next(batches, None) is None and not each.mask.all()
