"""Pooling in every form, with every combiner, placement and dtype: forward, backward and the update against NumPy.

An example is a list of ids and their weights; NumPy processes the examples of all ranks one by one.
"""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.pairwise import pairwise, some_at

import hvdkit as hk

ROWS, WIDTH, K = 17, 3, 3
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-2, "bfloat16": 6e-2}


class Example(NamedTuple):
    ids: list
    weights: list


def examples_of(rank, form, batch):
    """Return one rank's examples. Forms of fixed length have one id per example, or K ids, or none."""
    rng = np.random.default_rng([rank, len(form), len(batch)])
    n = 0 if batch == "rank 1 has none" and rank == 1 else 4 + rank
    if batch == "no ids":
        lengths = np.zeros(n, int)
    elif form in ("dense", "uniform ragged"):
        lengths = np.full(n, K)
    elif form == "one id":
        lengths = np.ones(n, int)
    else:
        lengths = rng.integers(0, 4, n)
    drawn = np.minimum(rng.zipf(1.4, size=lengths.sum()) - 1, ROWS - 1)
    cuts = np.cumsum(lengths)[:-1]
    weights = np.split(rng.uniform(0.5, 2.0, len(drawn)), cuts) if n else []
    return [Example(i.tolist(), w.tolist()) for i, w in zip(np.split(drawn, cuts) if n else [], weights, strict=True)]


def tensors_of(examples, form, id_dtype, weight_dtype):
    """Return ids and weights in one of the layer's forms."""
    lengths = [len(e.ids) for e in examples]
    ids = tf.constant([i for e in examples for i in e.ids], id_dtype)
    weights = tf.constant([w for e in examples for w in e.weights], weight_dtype)
    if form in ("dense", "one id"):
        shape = [len(examples)] if form == "one id" else [len(examples), lengths[0] if lengths else K]
        return tf.reshape(ids, shape), tf.reshape(weights, shape)
    if form == "ragged":
        return tuple(tf.RaggedTensor.from_row_lengths(x, lengths) for x in (ids, weights))
    if form == "uniform ragged":
        length, n = (lengths[0] if lengths else K), len(examples)
        return tuple(tf.RaggedTensor.from_uniform_row_length(x, length, nrows=n) for x in (ids, weights))
    # A sparse tensor's indices may have gaps, and here they are not ordered.
    places = [(row, 2 * k + 1) for row, length in enumerate(lengths) for k in range(length)]
    order = np.random.default_rng(0).permutation(len(places))
    places = np.array(places, "i8").reshape(-1, 2)[order]
    shape = (len(examples), 2 * K + 2)
    return tuple(tf.SparseTensor(places, tf.gather(x, order), shape) for x in (ids, weights))


def factors(example, combiner, weighted):
    """Return the factor of each id's row in the example's vector."""
    w = np.array(example.weights if weighted else np.ones(len(example.ids)))
    if combiner == "mean":
        return w / w.sum() if len(w) else w
    return w / np.sqrt((w * w).sum()) if combiner == "sqrtn" and len(w) else w


def pooled(table, examples, combiner, weighted):
    rows = [factors(e, combiner, weighted) @ table[e.ids] if e.ids else np.zeros(WIDTH) for e in examples]
    return np.reshape(rows, (-1, WIDTH))


@pairwise(
    ranks=(1, 3),
    form=["dense", "one id", "ragged", "uniform ragged", "sparse"],
    combiner=["sum", "mean", "sqrtn"],
    placement=["row", "div", "column", "table", "replicated"],
    dtype=["float32", "float64", "float16", "bfloat16"],
    weighted=[False, True],
    ids=["int32", "int64"],
    batch=["full", "rank 1 has none", "no ids"],
    traced=[False, False, False, True],
)
def test_pooling_equals_numpy(form, combiner, placement, dtype, weighted, ids, batch, traced, rank, size):
    if form == "one id" and batch == "no ids":
        batch = "full"
    table = hk.layers.Table("t", ROWS, WIDTH, combiner=combiner, dtype=dtype)
    layer = hk.layers.ShardedEmbeddingCollection([table], {"t": placement}, seed=2, dtype="float32")
    layer.build()
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hk.Sum)
    optimizer.build(layer.trainable_variables)
    every = [examples_of(r, form, batch) for r in range(size)]
    cotangents = [np.random.default_rng([7, r]).normal(size=(len(e), WIDTH)).astype("f4") for r, e in enumerate(every)]
    given, weights = tensors_of(every[rank], form, ids, "float32")

    def step(given, cotangent):
        with tf.GradientTape() as tape:
            found = layer({"t": given})["t"]
            loss = tf.reduce_sum(found * cotangent)
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return found

    before = layer.gather("t").astype("f8")
    run = tf.function(step) if traced else step
    found = run((given, weights) if weighted else given, tf.constant(cotangents[rank]))
    assert found.dtype == tf.float32 and found.shape == (len(every[rank]), WIDTH)
    near = {"rtol": TOLERANCE[dtype] if dtype != "float64" else 1e-6, "atol": TOLERANCE[dtype]}
    np.testing.assert_allclose(found, pooled(before, every[rank], combiner, weighted), **near)
    expected = before.copy()
    for examples, cotangent in zip(every, cotangents, strict=True):
        for example, g in zip(examples, cotangent, strict=True):
            np.add.at(expected, example.ids, -factors(example, combiner, weighted)[:, None] * g)
    updated = {"rtol": max(near["rtol"], 1e-6), "atol": 10 * TOLERANCE[dtype]}
    np.testing.assert_allclose(layer.gather("t").astype("f8"), expected, **updated)


# ---- shapes ---------------------------------------------------------------------------------------------------

SHAPES = [(), (0,), (1,), (4,), (4, 1), (2, 3), (0, 3), (3, 0), (2, 3, 4), (0, 0)]
DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pairwise(combiner=[None, "sum", "mean"], placement=["row", "column", "replicated"], traced=[False, False, True])
def test_odd_shapes_and_dtypes_of_ids(combiner, placement, traced, rank):
    """Like ``keras.layers.Embedding`` without a combiner; with one, the last of two or more axes is combined."""
    table = hk.layers.Table("t", ROWS, WIDTH, combiner=combiner)
    layer = hk.layers.ShardedEmbeddingCollection([table], {"t": placement}, seed=2)
    whole = layer.gather("t")
    call = tf.function(layer) if traced else layer
    for number, shape in enumerate(SHAPES[len(placement) % 5 :: 5] if traced else SHAPES):
        given = np.random.default_rng(rank).integers(0, ROWS, shape)
        expected = whole[given]
        if combiner is not None and len(shape) > 1:
            expected = expected.sum(-2) / (max(1, shape[-1]) if combiner == "mean" else 1)
        ids = np.asarray(given, DTYPES[number % len(DTYPES)])
        found = call({"t": tf.constant(ids) if number % 3 else ids})["t"]
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("placement", ["row", "div", "column", "table", "replicated"])
def test_fewer_rows_or_columns_than_ranks(placement, rank, size):
    rows, width = {"row": (1, 1), "div": (2, 5), "column": (5, 1), "table": (1, 1), "replicated": (1, 1)}[placement]
    layer = hk.layers.ShardedEmbeddingCollection([hk.layers.Table("t", rows, width)], {"t": placement}, seed=1)
    layer.build()
    before = layer.gather("t")
    assert before.shape == (rows, width)
    ids = np.arange(3 * rank) % rows
    optimizer = hk.DistributedOptimizer(keras.optimizers.Adagrad(0.5), op=hk.Sum)
    with tf.GradientTape() as tape:
        found = layer({"t": ids})["t"]
        loss = tf.reduce_sum(found)
    np.testing.assert_array_equal(found, before[ids])
    optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
    uses = np.bincount(np.concatenate([np.arange(3 * r) % rows for r in range(size)]).astype(int), minlength=rows)
    expected = before - 0.5 * uses[:, None] / np.sqrt(0.1 + uses[:, None] ** 2 + 1e-7)
    np.testing.assert_allclose(layer.gather("t"), expected, rtol=1e-5, atol=1e-6)


# ---- ragged ---------------------------------------------------------------------------------------------------

NESTED = [[[1, 2], [], [3]], [], [[4, 4, 5]]]
UNIFORM_INSIDE = tf.RaggedTensor.from_row_lengths([[1, 2], [3, 4], [5, 6]], [2, 0, 1])  # [3, None, 2]
RAGGED = {
    "one axis": (tf.ragged.constant([[1, 2], [], [3]]), [[1, 2], [], [3]]),
    "uniform lengths": (tf.RaggedTensor.from_uniform_row_length([1, 2, 3, 4], 2), [[1, 2], [3, 4]]),
    "two axes": (tf.ragged.constant(NESTED), NESTED),
    "a uniform inner axis": (UNIFORM_INSIDE, UNIFORM_INSIDE.to_list()),
    "a uniform outer axis": (
        tf.RaggedTensor.from_uniform_row_length(tf.ragged.constant([[1], [2, 3], [], [4]]), 2),
        [[[1], [2, 3]], [[], [4]]],
    ),
    "no inner ids": (tf.RaggedTensor.from_row_lengths(tf.zeros([3, 0], tf.int32), [2, 1]), [[[], []], [[]]]),
}


RAGGED_CASES = zip(
    [form for form in RAGGED for _ in range(2)],
    cycle([None, "sum", None, "mean"]),
    cycle([False, False, False, False, True]),
    cycle(["mod", "column", "mod"]),
    strict=False,
)


@pytest.mark.parametrize(("form", "combiner", "traced", "partition"), some_at((3,), [*RAGGED_CASES]))
def test_ragged_ids_of_any_rank(form, combiner, traced, partition, rank, size):
    """The last axis is combined, ragged or uniform; the remaining ragged axes stay ragged."""
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, combiner=combiner, partition=partition, seed=3)
    layer.build()
    given, nest = RAGGED[form]
    depth = given.shape.rank
    if rank == 1:  # this rank has no examples
        given, nest = given[:0], []
    call = tf.function(layer, reduce_retracing=True) if traced else layer
    whole = layer.gather()

    def vector(ids):
        rows = whole[np.array(ids, int)]
        return (rows.sum(0) / (max(1, len(ids)) if combiner == "mean" else 1)).tolist()

    def outputs(part, level):
        if combiner is None:
            return whole[part].tolist() if level == 0 else [outputs(x, level - 1) for x in part]
        return vector(part) if level == 1 else [outputs(x, level - 1) for x in part]

    found = call(given)
    expected = outputs(nest, depth)
    ragged = isinstance(found, tf.RaggedTensor)
    assert ragged == (combiner is None or depth > 2)
    got = found.to_list() if ragged else found.numpy().tolist()
    assert _shape(got) == _shape(expected)
    np.testing.assert_allclose(_flat(got), _flat(expected), rtol=1e-5, atol=1e-6)
    if ragged:
        assert found.ragged_rank == given.ragged_rank - (combiner is not None and given.flat_values.shape.rank == 1)


def _shape(nest):
    return [_shape(x) for x in nest] if isinstance(nest, list) else None


def _flat(nest):
    return [y for x in nest for y in _flat(x)] if isinstance(nest, list) else [nest]


def test_weights_of_nested_ragged_ids(rank, size):
    layer = hk.layers.ShardedEmbedding(ROWS, 2, combiner="sum", seed=3)
    layer.build()
    whole = layer.gather()
    ids, weights = tf.ragged.constant([[[1, 2], []], [[3]]]), tf.ragged.constant([[[0.5, 2.0], []], [[-1.0]]])
    found = layer((ids, weights))
    np.testing.assert_allclose(found.flat_values, [0.5 * whole[1] + 2 * whole[2], [0, 0], -whole[3]], rtol=1e-5)
    uniform = tf.RaggedTensor.from_row_lengths([[1, 2], [3, 4]], [2, 0])
    halves = tf.RaggedTensor.from_row_lengths([[0.5, 0.5], [0.5, 0.5]], [2, 0])
    found = layer((uniform, halves))
    np.testing.assert_allclose(found.flat_values, (whole[[1, 3]] + whole[[2, 4]]) / 2, rtol=1e-5)
    for other in (tf.ragged.constant([[[0.5], [2.0]], [[-1.0]]]), tf.ragged.constant([[0.5, 2.0, -1.0], []])):
        with pytest.raises(ValueError, match="weights: got 3 in feature 'embeddings'"):
            layer((ids, other))


# ---- ids without rows -----------------------------------------------------------------------------------------

FORMS = {
    "dense": lambda bad: tf.constant([[0, bad]]),
    "ragged": lambda bad: tf.ragged.constant([[0, 1], [bad]]),
    "nested": lambda bad: tf.ragged.constant([[[0], []], [[1, bad]]]),
    "sparse": lambda bad: tf.SparseTensor([[0, 3], [1, 1]], [0, bad], (2, 4)),
    "weighted": lambda bad: (tf.constant([[0, bad]]), tf.ones([1, 2])),
}


@pytest.mark.parametrize(
    ("form", "bad", "placement", "traced"),
    [
        ("dense", ROWS, "row", True),
        ("ragged", -1, "column", False),
        ("nested", 2**31 - 1, "replicated", False),
        ("sparse", ROWS, "column", True),
        ("weighted", -1, "row", False),
    ],
)
def test_a_bad_id_in_any_form_is_an_error_on_every_rank(form, bad, placement, traced, rank, size):
    tables = [
        hk.layers.Table("t", ROWS, WIDTH, combiner="sum", features=("f", "g")),
        hk.layers.Table("u", 3, 2, combiner="sum"),
    ]
    layer = hk.layers.ShardedEmbeddingCollection(tables, {"t": placement})
    layer.build()
    call, good = tf.function(layer) if traced else layer, FORMS[form](1)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as error:
        call({"f": good, "g": FORMS[form](bad if rank == size - 1 else 1), "u": good})
    said = str(error.value).replace("\\", "").replace("'", "")
    where = f"feature g of table t of layer {layer.name} on rank {size - 1}"
    assert f"ids: got {bad} in {where}, expected 0 to {ROWS - 1}" in said
    call({"f": good, "g": good, "u": good})


def test_unsigned_ids_beyond_int64_are_no_negative_ones(rank, size):
    """The row of a 64-bit hash is the unsigned number modulo the number of rows."""
    hashes = np.array([2**64 - 1, 2**63, 2**63 + 5, 7], np.uint64)
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, out_of_range="wrap", seed=1)
    np.testing.assert_array_equal(layer(tf.constant(hashes)), layer.gather()[(hashes % ROWS).astype(int)])
    dropped = hk.layers.ShardedEmbedding(ROWS, WIDTH, out_of_range="drop", seed=1)
    np.testing.assert_array_equal(dropped(tf.constant(hashes))[:3], np.zeros((3, WIDTH)))
    with pytest.raises(ValueError, match="expected 0 to 16"):
        hk.layers.ShardedEmbedding(ROWS, WIDTH)(tf.constant(hashes))
