"""Sharded layers: every form of ids, combiners, placements, Keras's ways to call a layer, and bad input."""

from __future__ import annotations

from itertools import cycle

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.pairwise import pairs, printed

import hvdkit as hk

pytestmark = pytest.mark.core(2)

Table = hk.layers.Table
TABLES = [
    Table("users", 23, 8, features=("buyer", "seller")),
    Table("items", 40, 4, combiner="mean"),
    Table("tags", 9, 4, combiner="sum"),
    Table("words", 31, 6, combiner="sqrtn"),
    Table("small", 3, 2),
]
PLANS = {
    "auto": "auto",
    "rows": dict.fromkeys(["users", "items", "tags", "words", "small"], "row"),
    "mixed": {"users": "column", "items": "table", "tags": "row", "words": "div", "small": "replicated"},
    "tables": dict.fromkeys(["users", "items", "tags", "words", "small"], "table"),
}


def inputs_of(rank, step=0):
    """Return one rank's features, in every form; rank 1 of several has no examples."""
    rng = np.random.default_rng([rank, step])
    n = 0 if rank == 1 else 4 + rank
    lengths = rng.integers(0, 4, n)
    ragged = tf.RaggedTensor.from_row_lengths(rng.integers(0, 40, lengths.sum()), lengths)
    places = np.argwhere(rng.random((n, 5)) < 0.5).reshape(-1, 2)
    sparse = tf.SparseTensor(places, rng.integers(0, 9, len(places)), (n, 5))
    weights = tf.SparseTensor(places, rng.random(len(places)).astype("f4"), (n, 5))
    return {
        "buyer": tf.constant(rng.integers(0, 23, (n, 2)), tf.int32),
        "seller": tf.constant(rng.integers(0, 23, n), tf.int64),
        "items": ragged,
        "tags": (sparse, weights),
        "words": (tf.constant(rng.integers(0, 31, (n, 3))), tf.constant(rng.random((n, 3)), tf.float32)),
        "small": tf.RaggedTensor.from_row_lengths(rng.integers(0, 3, lengths.sum()), lengths),
    }


def numpy_lookup(tables, inputs):
    """Look up every feature, one example at a time."""
    out = {name: tables["users"][inputs[name].numpy()] for name in ("buyer", "seller")}
    rows = inputs["items"].to_list()
    out["items"] = np.array([tables["items"][r].mean(0) if r else np.zeros(4) for r in rows]).reshape(-1, 4)
    sparse, weights = inputs["tags"]
    out["tags"] = np.zeros((sparse.dense_shape[0], 4))
    for (example, _), i, w in zip(sparse.indices.numpy(), sparse.values.numpy(), weights.values.numpy(), strict=True):
        out["tags"][example] += w * tables["tags"][i]
    ids, w = (x.numpy() for x in inputs["words"])
    out["words"] = (tables["words"][ids] * w[..., None]).sum(1) / np.sqrt((w * w).sum(1))[:, None]
    out["small"] = tables["small"][inputs["small"].flat_values.numpy()]
    return out


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("plan", list(PLANS))
def test_every_form_and_placement_equals_numpy(plan, rank, size):
    layer = hk.layers.ShardedEmbeddingCollection(TABLES, PLANS[plan], seed=3)
    layer.build()
    tables = {table.name: layer.gather(table.name) for table in TABLES}
    for call in (layer, tf.function(layer)):
        found = call(inputs_of(rank))
        assert isinstance(found["small"], tf.RaggedTensor)
        found["small"] = found["small"].flat_values
        for name, expected in numpy_lookup(tables, inputs_of(rank)).items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    held = sum(int(np.prod(v.shape)) for v in layer.weights)
    whole = sum(t.input_dim * t.output_dim for t in TABLES)
    if plan == "rows":
        assert held <= whole / size + sum(t.output_dim for t in TABLES)
    on_chief = layer.gather("users", root=0)
    assert on_chief.shape == (23, 8) if hk.is_chief() else on_chief is None


@pytest.mark.nightly
def test_ids_that_travel_ahead_give_the_same(rank, size):
    """Each step requests the next one's rows; they are read after the update."""
    results = []
    for ahead in (False, True):
        layer = hk.layers.ShardedEmbeddingCollection(
            [*TABLES, Table("any", 32, 2, evict="lru")], PLANS["mixed"], seed=3
        )
        layer.build()
        optimizer = hk.DistributedOptimizer(keras.optimizers.Adagrad(0.5))
        optimizer.build(layer.trainable_variables)

        def update(given, layer=layer, optimizer=optimizer):
            with tf.GradientTape() as tape:
                found = layer(given, training=True)
                loss = tf.add_n([tf.reduce_sum(getattr(v, "flat_values", v) ** 2) for v in found.values()])
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)

        @tf.function(reduce_retracing=True)
        def step(asked, following, update=update, layer=layer):
            following = layer.ask(following)
            update(asked)
            return following

        inputs = [{**inputs_of(rank, s), "any": tf.constant([s, -7, 2**40 + rank])} for s in range(4)]
        asked = layer.ask(inputs[0])
        for number in range(3):
            if ahead:
                asked = step(asked, inputs[number + 1])
            else:
                update(inputs[number])
        results.append([layer.gather(t.name) for t in layer.tables])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="got 23 in feature 'buyer'"):
        layer.ask({**inputs[0], "buyer": tf.constant([23])})
    with pytest.raises(ValueError, match="inputs: got"):
        hk.layers.ShardedEmbeddingCollection(TABLES)(asked)


@pytest.mark.full
def test_fit_evaluate_and_predict(rank, size):
    """The last batch is short and ranks see different rows; weights and outputs equal those of one process."""
    rng = np.random.default_rng(0)
    ids, y = rng.integers(0, 30, (50, 3)), rng.normal(size=(50, 1)).astype("f4")
    layer = hk.layers.ShardedEmbedding(30, 4, combiner="mean", seed=5)
    given = keras.Input((3,), dtype="int64")
    model = keras.Model(given, keras.layers.Dense(1, kernel_initializer="ones")(layer(given)))
    model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse", jit_compile=False)
    batches = hk.data.GlobalBatches((ids, y), 20, shuffle_seed=1)
    layer.build()
    start = layer.gather()
    model.fit(batches.as_keras(), epochs=2, verbose=0, shuffle=False)

    embed, out = keras.layers.Embedding(30, 4), keras.layers.Dense(1, kernel_initializer="ones")
    alone = keras.Sequential([keras.Input((3,), dtype="int64"), embed, keras.layers.GlobalAveragePooling1D(), out])
    embed.set_weights([start])
    alone.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    whole = hk.data.GlobalBatches((ids, y), 20, shuffle_seed=1, rank=0, size=1)
    alone.fit(whole.as_keras(), epochs=2, verbose=0, shuffle=False)
    np.testing.assert_allclose(layer.gather(), embed.get_weights()[0], rtol=1e-4, atol=1e-6)
    own = ids[: 7 + rank]  # a different number on every rank, and a short last batch
    expected = alone.predict(own, verbose=0)
    np.testing.assert_allclose(model.predict(own, batch_size=6 + rank, verbose=0), expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(model.evaluate(own, y[: 7 + rank], batch_size=6 + rank, verbose=0))


def test_ids_out_of_range_are_wrapped_or_dropped_when_asked(rank):
    for how, combiner in printed(pairs(how=["wrap", "drop"], combiner=[None, "mean"])):
        layer = hk.layers.ShardedEmbedding(10, 3, combiner=combiner, out_of_range=how, seed=1)
        ids = np.array([[-1, 3], [10, 25], [rank % 10, 9]])
        found, table = layer(ids).numpy(), layer.gather()
        rows = table[ids % 10] * (1 if how == "wrap" else ((ids >= 0) & (ids < 10))[..., None])
        if combiner:
            count = 2 if how == "wrap" else np.maximum(1, ((ids >= 0) & (ids < 10)).sum(1, keepdims=True))
            rows = rows.sum(1) / count
        np.testing.assert_allclose(found, rows, rtol=1e-6)


ONES = {"a": tf.constant([[1, 2]]), "b": tf.constant([1])}
RAGGED, SPARSE = tf.ragged.constant([[1, 2]]), tf.sparse.from_dense([[1, 2]])
INPUTS = {  # input of all ranks, input of the last one instead, and its error
    "floats": (ONES, {**ONES, "b": tf.constant([1.0])}, "ids of 'b': got float32"),
    "missing": (ONES, {"a": ONES["a"]}, "inputs: got"),
    "shape": (ONES, {**ONES, "a": (ONES["a"], tf.ones([1, 1]))}, "weights of 'a': got shape"),
    "ragged": (ONES, {**ONES, "a": (RAGGED, tf.ragged.constant([[1.0]]))}, "weights: got 1 in feature 'a'"),
    "sparse": (ONES, {**ONES, "a": (SPARSE, tf.sparse.from_dense([[0.0, 2.0]]))}, "weights: got 1 in feature 'a'"),
}


class Broken:
    """Unreadable input that raises neither a ValueError nor a TypeError."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("the file is gone")


def test_ids_that_one_rank_cannot_read_are_an_error_on_all(rank, size):
    layer = hk.layers.ShardedEmbeddingCollection([Table("a", 20, 2)], {"a": "row"})
    last = rank == size - 1
    with pytest.raises((RuntimeError, ValueError), match="gone" if last else f"rank {size - 1} rejected its inputs"):
        layer.ask({"a": Broken() if last else tf.constant([1])})


@pytest.mark.parametrize(("what", "plan"), zip(INPUTS, cycle(["row", "replicated"]), strict=False))
def test_inputs_that_one_rank_cannot_use_are_an_error_on_all(what, plan, rank, size):
    layer = hk.layers.ShardedEmbeddingCollection(
        [Table("a", 20, 2, combiner="sum"), Table("b", 30, 3)], {"a": plan, "b": plan}
    )
    given, instead, said = INPUTS[what]
    if what in ("ragged", "sparse"):
        others = f"weights: got 1 in feature 'a' of table 'a' of layer '{layer.name}' on rank"
    else:
        others = f"rank {size - 1} rejected its inputs"
    with pytest.raises((ValueError, TypeError), match=said if rank == size - 1 else others):
        layer(instead if rank == size - 1 else given)
    assert layer(ONES)["a"].shape == (1, 2)


def test_bad_arguments_name_themselves(rank):
    with pytest.raises(ValueError, match="output_dim of table 't': got 0"):
        Table("t", 3, 0)
    with pytest.raises(ValueError, match="input_dim of table 't': got 0"):
        Table("t", 0, 3)
    with pytest.raises(ValueError, match="for 7 ranks"):
        hk.layers.ShardedEmbeddingCollection([Table("a", 3, 2)], hk.plan_tables([Table("a", 3, 2)], 7))
    layer = hk.layers.ShardedEmbeddingCollection([Table("a", 3, 2), Table("b", 3, 2, combiner="sum")])
    with pytest.raises(TypeError, match="ids of 'a': got dtype float32"):
        layer({"a": keras.Input((2,)), "b": keras.Input((2,), dtype="int64")})
    with pytest.raises(hk.CollectiveMismatchError, match="tables"):
        hk.layers.ShardedEmbedding(3 + rank, 2).build()
