"""Sharded embeddings in one process: what is refused, symbolic outputs, and Keras's configs and files."""

from __future__ import annotations

import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values
from helpers.pairwise import printed

import hvdkit as hk
from hvdkit import registration
from hvdkit.sharding.layout import lay_out

hk.init()
ROWS, WIDTH = 11, 4
Table = hk.layers.Table


@pytest.mark.parametrize(
    ("rows", "dtype", "options"),
    [
        (2**24 + 1, "float32", {}),
        (2**11 + 1, "float16", {}),
        (2**8 + 1, "bfloat16", {}),
        (64, "float32", {"evict": "lru"}),
        (10, "float32", {"out_of_range": "wrap"}),
    ],
)
def test_floats_that_do_not_hold_every_row_are_refused(rows, dtype, options):
    """Keras's own layer silently rounds such ids."""
    said = rf"ids of 'embeddings': got {dtype} \(exact up to .*keras.Input"
    with pytest.raises(TypeError, match=said):
        hk.layers.ShardedEmbedding(rows, 1, **options).compute_output_spec(keras.KerasTensor((None,), dtype))
    if rows < 2**24:
        policy = f"mixed_{dtype}" if "16" in dtype else dtype
        with pytest.raises(TypeError, match=said):
            keras.Sequential([hk.layers.ShardedEmbedding(rows, 1, dtype=policy, **options)])(tf.constant([[1, 2]]))


@pytest.mark.parametrize(("form", "axes"), [("dense", 1), ("dense", 2), ("ragged", 2), ("ragged", 3), ("sparse", 2)])
def test_symbolic_outputs_have_the_form_of_real_ones(form, axes):
    kind = {} if form == "dense" else {form: True}
    given = [keras.Input((3, 2)[: axes - 1], dtype=dtype, **kind) for dtype in ("int32", "float32")]
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, combiner="mean")
    for found in (layer(given[0]), layer(tuple(given))):
        assert found.dtype == "float32" and not found.sparse and found.ragged == (form == "ragged" and axes == 3)
        assert found.shape == ((None, WIDTH) if axes < 3 else (None, 3, WIDTH))
    if form != "sparse":
        apart = hk.layers.ShardedEmbedding(ROWS, WIDTH)
        assert apart(given[0]).shape == (*given[0].shape, WIDTH) == apart.compute_output_shape(given[0].shape)
        assert layer.compute_output_shape(given[0].shape) == found.shape


def test_arguments_of_keras_embedding_that_have_no_counterpart():
    make = hk.layers.ShardedEmbedding
    with pytest.raises(TypeError, match="embeddings_constraint: got NonNeg, expected None"):
        make(3, 2, embeddings_constraint=keras.constraints.NonNeg())
    with pytest.raises(TypeError, match=r"weights: got list, .*embeddings_initializer"):
        make(3, 2, weights=[np.zeros((3, 2))])
    for name, value in (("lora_rank", 2), ("lora_alpha", 2), ("quantization_config", object())):
        with pytest.raises(TypeError, match=f"{name}: got"):
            make(3, 2, **{name: value})
    assert make(3, 2, weights=None).get_config()["output_dim"] == 2
    for regularizer in (keras.regularizers.OrthogonalRegularizer(), lambda x: 0.0, "no such"):
        with pytest.raises(ValueError, match="regularizer of table 'embeddings'"):
            make(3, 2, embeddings_regularizer=regularizer)
    with pytest.raises(ValueError, match="expected None with evict"):
        make(3, 2, embeddings_regularizer="l2", evict="lru")


def test_names_of_outputs_and_features_are_told_apart():
    make = hk.layers.ShardedEmbeddingCollection
    with pytest.raises(ValueError, match="'f@a' is the name of another feature's output"):
        make([Table("a", 3, 2, features=("f", "f@a")), Table("b", 3, 2, features=("f",))])
    with pytest.raises(ValueError, match=r"features of table 'a': got \['f', 'f'\]"):
        Table("a", 3, 2, features=("f", "f"))
    with pytest.raises(ValueError, match="name 'a' twice"):
        make([Table("a", 3, 2), Table("a", 4, 2)])


def test_the_plan_counts_each_tables_slots():
    tables = [Table("a", 1000, 32, optimizer=keras.optimizers.Adam()), Table("b", 1000, 32)]
    one = hk.plan_tables(tables, 1, optimizer="sgd")
    assert one.ranks[0].slots == 2 * tables[0].bytes
    assert hk.plan_tables(tables, 1, optimizer="adagrad").ranks[0].slots == 3 * tables[0].bytes
    groups = lay_out(tables, {"a": "row", "b": "row"}, 1).groups
    assert [g.optimizer is None for g in groups] == [False, True]


def layers_of_all_kinds():
    adagrad = keras.optimizers.Adagrad(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    tables = [
        Table("a", 9, 2, features=("x", "group/y"), initializer=keras.initializers.RandomUniform(-0.5, 0.5)),
        Table("b", 8, 3, combiner="mean", features=("x",), optimizer=adagrad, regularizer="l2", mask_zero=True),
        Table("c", 4, 2, evict="lfu"),
    ]
    one = {"embeddings_initializer": np.arange(18.0).reshape(9, 2), "embeddings_regularizer": "l1", "mask_zero": True}
    return [
        hk.layers.ShardedEmbedding(9, 2, combiner="sum", partition="div", seed=4, optimizer="adagrad", **one),
        hk.layers.ShardedEmbeddingCollection(tables, {"a": "column"}, seed=4, out_of_range="drop", compression="bf16"),
        hk.layers.ShardedEmbeddingCollection([Table("a", 9, 2)], seed=1, dtype="mixed_bfloat16"),
        hk.layers.ColumnParallelDense(5, activation="gelu", gather_output=True, use_bias=False, seed=3),
        hk.layers.RowParallelDense(5, input_dim=4, input_is_parallel=False, kernel_initializer="ones"),
    ]


@pytest.mark.parametrize("number", range(5))
def test_layers_are_made_again_by_keras(number):
    layer = layers_of_all_kinds()[number]
    registered = {name for name in keras.saving.get_custom_objects() if name.startswith("hvdkit>")}
    assert {f"hvdkit>{name}" for name in registration.LAYERS} <= registered
    assert f"hvdkit>{type(layer).__name__}" in registered
    for again in (
        keras.layers.deserialize(keras.layers.serialize(layer)),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer)),
        type(layer).from_config(layer.get_config()),
    ):
        assert type(again) is type(layer)
        mine, theirs = (keras.saving.serialize_keras_object(x) for x in (layer, again))
        assert mine == theirs
    if number < 3:
        again.build(), layer.build()
        same_values(again.weights, layer.weights)


def test_files_of_earlier_versions_contain_an_option_that_was_removed(tmp_path):
    """They say whether ranks pass ids of their own examples (``dp_input``: true), the only way left."""
    ids = keras.Input((), dtype="int64", name="a")
    layer = hk.layers.ShardedEmbeddingCollection([Table("a", 9, 2)], {"a": "row"}, seed=1)
    model = keras.Model({"a": ids}, layer({"a": ids}))
    model.save(tmp_path / "now.keras")
    for value in ("true", "false"):
        path = tmp_path / f"{value}.keras"
        with zipfile.ZipFile(tmp_path / "now.keras") as now, zipfile.ZipFile(path, "w") as before:
            for name in now.namelist():
                content = now.read(name)
                if name == "config.json":
                    option = f'"out_of_range": "error", "dp_input": {value}'.encode()
                    assert content.count(b'"out_of_range": "error"') == 1
                    content = content.replace(b'"out_of_range": "error"', option)
                before.writestr(name, content)
    same_values(keras.saving.load_model(tmp_path / "true.keras").get_weights(), model.get_weights())
    refused = "dp_input: got False, expected True.*; leave it out, and pass the ids of each rank's own examples"
    with pytest.raises(ValueError, match=refused):
        keras.saving.load_model(tmp_path / "false.keras")
    with pytest.raises(ValueError, match=refused):
        hk.layers.ShardedEmbeddingCollection([Table("a", 9, 2)], dp_input=False)


def test_a_file_of_another_layer_is_refused():
    layer = hk.layers.ShardedEmbeddingCollection([Table("a", 9, 2)], {"a": "row"})
    layer.build()
    for stored, said in (
        ({"a": np.zeros((8, 2), "f4")}, r"got shape \[8, 2\] of 'a', expected \[9, 2\]"),
        ({"b": np.zeros((9, 2), "f4")}, r"got \['b'\], expected \['a'\]"),
    ):
        with pytest.raises(ValueError, match=said):
            layer.load_own_variables(stored)


def test_ids_that_come_and_go_have_rules_of_their_own():
    table = hk.layers.Table("t", 33, 2, evict="lru")
    assert table.input_dim == 64
    with pytest.raises(ValueError, match=r"evict of table 't': got fifo, expected None, 'lru' or 'lfu'"):
        hk.layers.Table("t", 33, 2, evict="fifo")
    with pytest.raises(ValueError, match=r"placements\['t'\]: got column, expected 'row' for a table that evicts"):
        hk.layers.ShardedEmbeddingCollection([table], {"t": "column"})
    orthogonal = hk.layers.Table("t", 33, 2, evict="lru", initializer="orthogonal")
    with pytest.raises(ValueError, match="initializer of table 't'"):
        hk.layers.ShardedEmbeddingCollection([orthogonal]).build()
    layer = hk.layers.ShardedEmbedding(33, 2, evict="lru")
    for call in (layer, tf.function(layer)):
        said = "training: got None, expected True where table 'embeddings'"
        with pytest.raises(LookupError, match=said), tf.GradientTape() as tape:
            loss = tf.reduce_sum(call(tf.constant([1, 2])))
            tape.gradient(loss, layer.trainable_variables)
    with pytest.raises(ValueError, match="expected one created with evict="):
        hk.layers.ShardedEmbedding(3, 2).ids()


def test_a_combiner_needs_a_known_number_of_axes():
    """Otherwise the shape at run time would decide whether the ids are one example or several."""
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, combiner="sum")
    layer.build()
    unknown = tf.function(layer.ask, input_signature=[tf.TensorSpec(None, tf.int32)])
    with pytest.raises(ValueError, match="ids of 'embeddings': got unknown shape"):
        unknown(tf.constant([1, 2]))


def test_weights_keep_their_dtype():
    """Keras's autocast would round weights to the layer's compute dtype."""
    layer = hk.layers.ShardedEmbedding(ROWS, 1, combiner="sum", embeddings_initializer="ones", dtype="mixed_float16")
    found = layer((tf.constant([[1, 2]]), tf.constant([[1e5, -1e5 + 1]])))  # 100,000 is too large for float16
    assert found.dtype == tf.float16 and found.numpy() == [[1.0]]


def test_a_sequential_of_several_forms_of_ids():
    """(batch,), (batch, 1), and with a combiner (batch, k)."""
    for combiner, shape, expected in ((None, (5,), (5, 4)), (None, (5, 1), (5, 1, 4)), ("mean", (5, 3), (5, 4))):
        model = keras.Sequential([hk.layers.ShardedEmbedding(ROWS, WIDTH, combiner=combiner)])
        assert model(np.ones(shape, "i8")).shape == expected


def test_masks_of_requests_ragged_ids_and_collections():
    tables = [Table("a", ROWS, WIDTH, mask_zero=True), Table("b", ROWS, WIDTH, combiner="sum", mask_zero=True)]
    layer = hk.layers.ShardedEmbeddingCollection(tables, {"a": "row"})
    given = {"a": tf.constant([[1, 0]]), "b": tf.constant([[0, 2]])}
    for found in (layer(given), layer(layer.ask(given))):
        np.testing.assert_array_equal(found["a"]._keras_mask, [[True, False]])
        assert getattr(found["b"], "_keras_mask", None) is None
    one = hk.layers.ShardedEmbedding(ROWS, WIDTH, mask_zero=True)
    assert one.compute_mask(tf.ragged.constant([[1, 0], [3]])).to_list() == [[True, False], [True]]


def test_a_combiner_leaves_padding_out():
    layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, combiner="mean", mask_zero=True, seed=1)
    table = layer.gather()
    forms = {
        "dense": tf.constant([[1, 0, 2], [0, 0, 0]]),
        "ragged": tf.ragged.constant([[1, 0, 2], [0]]),
        "sparse": tf.SparseTensor([[0, 0], [0, 1], [0, 2], [1, 1]], [1, 0, 2, 0], (2, 3)),
        "weighted": (tf.constant([[1, 0, 2], [0, 0, 0]]), tf.constant([[1.0, 9.0, 1.0], [1.0, 1.0, 1.0]])),
    }
    for form in printed(forms):
        found = layer(forms[form])
        np.testing.assert_allclose(found, [(table[1] + table[2]) / 2, np.zeros(WIDTH)], rtol=1e-5, atol=1e-7)
        assert getattr(found, "_keras_mask", None) is None
