"""Sets of tables in models, compared with ``keras.layers.Embedding`` in one process on the same global batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import mine, same_values
from helpers.pairwise import pairwise, some_at

import hvdkit as hk

Table = hk.layers.Table
BATCH = 11  # not a multiple of the number of ranks


class Tables:
    """Random tables, some with several features, and Keras's embeddings with the same initial values."""

    def __init__(self, seed, many, combiner=None):
        rng = np.random.default_rng(seed)
        self.sizes = [(int(rng.integers(4, 20)), int(rng.integers(2, 6))) for _ in range(many)]
        self.of_feature = [*range(many), *(int(i) for i in rng.integers(0, many, 3))]
        rng.shuffle(self.of_feature)
        self.combiner = combiner
        self.values = [rng.normal(size=size).astype("f4") for size in self.sizes]
        self.head = rng.normal(size=(sum(self.sizes[t][1] for t in self.of_feature), 2)).astype("f4")

    def tables(self, **options):
        features = {t: [f"f{i}" for i, of in enumerate(self.of_feature) if of == t] for t in range(len(self.sizes))}
        return [
            Table(f"t{t}", *size, self.combiner, tuple(features[t]), **options) for t, size in enumerate(self.sizes)
        ]

    def batch(self, step):
        """Return the ids of each feature in the global batch, and targets."""
        rng = np.random.default_rng([9, step])
        shape = (BATCH,) if self.combiner is None else (BATCH, 3)
        ids = {f"f{i}": rng.integers(0, self.sizes[t][0], shape) for i, t in enumerate(self.of_feature)}
        return ids, rng.normal(size=(BATCH, 2)).astype("f4")

    def trained(self, optimizer, batches):
        """Train Keras's embeddings and a dense layer in one process; return all weights."""
        layers = [keras.layers.Embedding(*size) for size in self.sizes]
        for layer, values in zip(layers, self.values, strict=True):
            layer.build()
            layer.set_weights([values])
        head = keras.Variable(self.head)
        variables = [*(layer.trainable_variables[0] for layer in layers), head]
        for ids, y in batches:
            with tf.GradientTape() as tape:
                found = [layers[t](ids[f"f{i}"]) for i, t in enumerate(self.of_feature)]
                if self.combiner is not None:
                    found = [getattr(tf, f"reduce_{self.combiner}")(x, 1) for x in found]
                loss = tf.reduce_mean((tf.concat(found, 1) @ head - y) ** 2)
            # Dense, because Keras's optimizers assume that the rows of a sparse gradient are distinct.
            optimizer.apply([tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)], variables)
        return [*(layer.get_weights()[0] for layer in layers), head.numpy()]


def assert_trains_as_keras(layer, world, optimizer, traced, rank, size):
    """Train a collection and a dense layer for two global batches; compare all weights with those of one process."""
    layer.set_weights(world.values)
    head, batches = keras.Variable(world.head), [world.batch(step) for step in range(2)]
    variables = [*layer.trainable_variables, head]
    distributed = hk.DistributedOptimizer(OPTIMIZERS[optimizer](), op=None)
    distributed.build(variables)

    def step(ids, y, weight):
        with hk.DistributedGradientTape(tf.GradientTape(), weight=weight) as tape:
            found = layer(ids, training=True)
            outputs = tf.concat([found[name] for name in sorted(found, key=lambda name: int(name[1:]))], 1) @ head
            loss = tf.reduce_mean((outputs - y) ** 2)
        distributed.apply(tape.gradient(loss, variables), variables)

    run = tf.function(step) if traced else step
    for ids, y in batches:
        given = {name: tf.constant(mine(x, rank, size)) for name, x in ids.items()}
        own = mine(y, rank, size)
        run(given, tf.constant(own), tf.constant(float(len(own))))
    expected = world.trained(OPTIMIZERS[optimizer](), batches)
    same_values([*layer.get_weights(), head.numpy()], expected, rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.3),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
}
PLANS = ["auto", "row", "column", "table", "mixed"]


@pairwise(
    ranks=(3,),
    plan=PLANS,
    optimizer=list(OPTIMIZERS),
    many=[1, 3],
    combiner=[None, "sum", "mean"],
    traced=[False, False, True],
)
def test_tables_and_shared_features_equal_keras(plan, optimizer, many, combiner, traced, rank, size):
    many = 5 if plan == "mixed" else many
    world = Tables(many, many, combiner)
    tables = world.tables()
    kinds = ["div", "column", "table", "replicated", "row"] if plan == "mixed" else [plan] * many
    plan = plan if plan == "auto" else {t.name: kind for t, kind in zip(tables, kinds, strict=False)}
    layer = hk.layers.ShardedEmbeddingCollection(tables, plan)
    assert_trains_as_keras(layer, world, optimizer, traced, rank, size)


# ---- features: in several tables, and in nested dicts ---------------------------------------------------------


def two_tables(plan):
    """Return a collection with the feature f2 in two tables, like TorchRec's "f2@t1"."""
    tables = [Table("t1", 10, 5, features=("f1", "f2")), Table("t2", 10, 3, features=("f2",), combiner="sum")]
    return hk.layers.ShardedEmbeddingCollection(tables, dict.fromkeys(["t1", "t2"], plan), seed=1)


@pytest.mark.core
@pytest.mark.parametrize("plan", ["row", "column", "table", "replicated"])
def test_a_feature_in_two_tables_has_an_output_for_each(plan, rank, size):
    layer = two_tables(plan)
    layer.build()
    first, second = layer.get_weights()
    ids = {"f1": tf.constant([[1, rank]]), "f2": tf.constant([[3, 9], [rank, rank]])}
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hk.Sum)
    with tf.GradientTape() as tape:
        found = layer(ids)
        loss = tf.add_n([tf.reduce_sum(x) for x in found.values()])
    assert list(found) == ["f1", "f2@t1", "f2@t2"]
    np.testing.assert_array_equal(found["f1"], first[ids["f1"]])
    np.testing.assert_array_equal(found["f2@t1"], first[ids["f2"]])
    np.testing.assert_allclose(found["f2@t2"], second[ids["f2"]].sum(1), rtol=1e-6)
    optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
    uses = np.zeros((2, 10))
    for r in range(size):
        np.add.at(uses, (slice(None), [3, 9, r, r]), 1)
        np.add.at(uses[0], [1, r], 1)
    for before, after, used in zip((first, second), layer.get_weights(), uses, strict=True):
        np.testing.assert_allclose(after, before - used[:, None], rtol=1e-5, atol=1e-6)


NESTED = [
    Table("users", 20, 4, combiner="mean", features=("user/clicks", "user/more/buys")),
    Table("items", 30, 3, combiner="sum", features=("item", "user/clicks")),
]


def nested_inputs(form, rank, weighted=False):
    rng = np.random.default_rng(rank)

    def one(rows):
        lengths = np.full(4, 2) if form == "dense" else rng.integers(0, 4, 4)
        ragged = tf.RaggedTensor.from_row_lengths(rng.integers(0, rows, lengths.sum()), lengths)
        weights = ragged.with_flat_values(tf.constant(rng.uniform(1, 2, lengths.sum()), tf.float32))
        shaped = [{"dense": lambda x: x.to_tensor(), "ragged": lambda x: x, "sparse": lambda x: x.to_sparse()}[form](x)
                  for x in (ragged, weights)]  # fmt: skip
        return tuple(shaped) if weighted else shaped[0]

    return {"user": {"clicks": one(20), "more": {"buys": one(20)}}, "item": one(30)}


@pytest.mark.parametrize(
    ("form", "weighted", "plan"), [("dense", False, "auto"), ("ragged", True, "row"), ("sparse", True, "auto")]
)
def test_nested_features_in_a_functional_model_are_trained(form, weighted, plan, rank, size):
    """Inputs and outputs have the same structure; fit changes every output."""
    keras.utils.set_random_seed(1)  # eager fit rejects weights that differ
    plan = plan if plan == "auto" else {"users": plan, "items": plan}
    layer = hk.layers.ShardedEmbeddingCollection(NESTED, plan, seed=1)
    shape = (2,) if form == "dense" else (None,)
    kind = {} if form == "dense" else {form: True}

    def given(name):
        ids = keras.Input(shape, dtype="int64", name=name, **kind)
        return (ids, keras.Input(shape, dtype="float32", name=f"{name}_weights", **kind)) if weighted else ids

    inputs = {"user": {"clicks": given("clicks"), "more": {"buys": given("buys")}}, "item": given("item")}
    outputs = layer(inputs)
    assert list(outputs["user"]) == ["clicks@users", "clicks@items", "more"] and list(outputs) == ["user", "item"]
    assert tuple(outputs["user"]["more"]["buys"].shape) == (None, 4)
    flat = keras.tree.flatten(outputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(flat)))
    optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(0.1))
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=form == "sparse")
    own = nested_inputs(form, rank, weighted)
    before = layer(own)
    model.fit(tf.data.Dataset.from_tensors((own, np.ones((4, 1), "f4"))), verbose=0)
    after = layer(own)
    keras.tree.assert_same_structure(before, after)
    for old, new in zip(keras.tree.flatten(before), keras.tree.flatten(after), strict=True):
        assert old.shape == new.shape and np.abs(old - new).max() > 1e-4
    asked = layer(layer.ask(own))
    same_values(keras.tree.flatten(asked), keras.tree.flatten(after))


def test_nested_inputs_that_do_not_fit_name_the_features(rank, size):
    layer = hk.layers.ShardedEmbeddingCollection(NESTED, "auto")
    good = nested_inputs("dense", 0)
    flat = {"user/clicks": good["user"]["clicks"], "user/more/buys": good["user"]["more"]["buys"], "item": good["item"]}
    assert list(layer(flat)) == ["user/clicks@users", "user/clicks@items", "user/more/buys", "item"]
    bad = {"user": {"clicks": good["user"]["clicks"]}, "item": good["item"]}
    said = r"inputs: got \['item', 'user/clicks'\], expected a dict of \['item', 'user/clicks', 'user/more/buys'\]"
    with pytest.raises(ValueError, match=said if rank == size - 1 else f"rank {size - 1} rejected its inputs"):
        layer(bad if rank == size - 1 else good)


# ---- an optimizer and a learning rate for each table ----------------------------------------------------------

AVERAGE = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
DEFAULTS = OPTIMIZERS | {"average": lambda: keras.optimizers.SGD(0.1, **AVERAGE)}


def with_optimizers(plan, **options):
    """Return four tables of one width: two with equal optimizers, one with another, one with the model's."""
    tables = [
        Table("fast", 9, 3, optimizer=keras.optimizers.Adagrad(0.5), **options),
        Table("slow", 8, 3, optimizer=keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))),
        Table("as fast", 7, 3, optimizer=keras.optimizers.Adagrad(0.5)),
        Table("model", 6, 3),
    ]
    return tables, hk.layers.ShardedEmbeddingCollection(tables, dict.fromkeys([t.name for t in tables], plan), seed=1)


def reference(values, optimizers, steps, clip=None):
    """Train whole tables in one process, each with its optimizer."""
    tables = [keras.Variable(v) for v in values]
    for step in steps:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                [loss_of({n: tf.gather(t.value, ids[n]) for n, t in zip(ids, tables, strict=True)}) for ids in step]
            )
        grads = [tf.convert_to_tensor(g) for g in tape.gradient(loss, [t.value for t in tables])]
        if clip is not None:
            grads = tf.clip_by_global_norm(grads, clip)[0]
        for optimizer, grad, table in zip(optimizers, grads, tables, strict=True):
            optimizer.apply([grad], [table])
    return [t.numpy() for t in tables]


def loss_of(found):
    return tf.add_n([tf.reduce_mean((x - i) ** 2) for i, x in enumerate(found.values())])


def ids_of(tables, step, rank):
    rng = np.random.default_rng([step, rank])
    return {t.name: rng.integers(0, t.input_dim, 5) for t in tables}


@pytest.mark.parametrize(
    ("plan", "traced", "clip", "default"),
    some_at(
        (1, 3),
        [
            ("row", True, 0.1, "momentum"),
            ("column", False, None, "sgd"),
            ("table", False, 0.1, "sgd"),
            ("replicated", True, None, "momentum"),
            ("row", True, None, "average"),
            ("replicated", False, None, "average"),
        ],
    ),
)
def test_each_table_is_updated_by_its_own_optimizer(plan, traced, clip, default, rank, size):
    tables, layer = with_optimizers(plan)
    layer.build()
    before = layer.get_weights()
    optimizer = hk.DistributedOptimizer(DEFAULTS[default](), clip_global_norm=clip)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = loss_of({t.name: layer(ids)[t.name] for t in tables})
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)

    if traced:
        optimizer.build(layer.trainable_variables)
    run = tf.function(step) if traced else step
    every = [[ids_of(tables, number, r) for r in range(size)] for number in range(3)]
    for number in range(3):
        run({name: tf.constant(x) for name, x in every[number][rank].items()})
    own = [t.optimizer if t.optimizer is not None else DEFAULTS[default]() for t in tables]
    copies = [type(o).from_config(o.get_config()) for o in own]
    same_values(layer.get_weights(), reference(before, copies, every, clip), rtol=1e-4, atol=1e-6)
    assert int(optimizer.iterations) == 3
    assert not any(t.optimizer.built for t in tables if t.optimizer is not None)  # the optimizers were copied
    names = [v.path for v in optimizer.variables]
    assert sum("accumulator" in name for name in names) == len([v for v in layer.weights if "fast" in pieces(v)])


def pieces(variable):
    from hvdkit.sharding.shards import shard_of

    shard = shard_of(variable)
    return variable.name if shard is None else " ".join(p.table for p in shard.pieces)


def test_averages_of_weights_are_swapped_in_next_to_tables_with_optimizers():
    """As with Keras's MultiOptimizer, of which one optimizer keeps averages."""
    ids = np.arange(32).reshape(16, 2) % 9
    labels = (ids.sum(axis=1, keepdims=True) / 9).astype("float32")
    own = keras.optimizers.SGD(0.5)
    averaging = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)

    def trained(fit, embed, optimizer):
        inputs = keras.Input((2,), dtype="int64")
        table, rows = embed(inputs)
        head = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Model(inputs, head(keras.layers.Flatten()(rows)))
        table.set_weights([np.linspace(-1, 1, 27, dtype="float32").reshape(9, 3)])
        model.compile(optimizer, "mse")
        options = {"validation_data": (ids, labels), "callbacks": [keras.callbacks.SwapEMAWeights()]}
        history = fit(model, ids, labels, batch_size=8, epochs=2, shuffle=False, verbose=0, **options)
        return [history.history["val_loss"], *table.get_weights(), *head.get_weights()]

    def sharded(inputs):
        table = hk.layers.ShardedEmbeddingCollection([Table("t", 9, 3, optimizer=own)], {"t": "row"})
        return table, table({"t": inputs})["t"]

    def plain(inputs):
        table = keras.layers.Embedding(9, 3)
        return table, table(inputs)

    found = trained(hk.fit, sharded, averaging)
    both = keras.optimizers.MultiOptimizer(lambda variable: own if "embedding" in variable.path else averaging)
    same_values(found, trained(keras.Model.fit, plain, both), rtol=1e-4, atol=1e-5)
    own = keras.optimizers.SGD(0.5, use_ema=True)
    with pytest.raises(ValueError, match=r"got SwapEMAWeights, expected tables whose own optimizers keep no averages"):
        trained(hk.fit, sharded, averaging)


@pytest.mark.nightly
def test_tables_with_optimizers_in_fit_and_in_checkpoints(rank, size, shared_path):
    """In mixed precision all of a model's variables have separate optimizers; slots and counters are restored."""

    def build(seed):
        keras.utils.set_random_seed(5)
        table = Table("t", 9, 3, optimizer=keras.optimizers.Adam(0.1))
        small = Table("s", 3, 3, optimizer=keras.optimizers.Adagrad(0.1))
        given = {"t": keras.Input((), dtype="int64", name="t"), "s": keras.Input((), dtype="int64", name="s")}
        layer = hk.layers.ShardedEmbeddingCollection([table, small], {"t": "row"}, seed=seed, name="embed")
        found = layer(given)
        model = keras.Model(given, keras.layers.Add(dtype="float32")([found["t"], found["s"]]))
        model.compile(hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
        return layer, model

    ids = {"t": np.arange(9), "s": np.arange(9) % 3}
    y = np.random.default_rng(3).normal(size=(9, 3))
    keras.config.set_dtype_policy("mixed_float16")
    try:
        layer, model = build(1)
        model.fit(ids, y, epochs=2, verbose=0, shuffle=False)
        assert int(model.optimizer.iterations) == 2
        hk.checkpoint.save(shared_path / "saved", {"model": model, "optimizer": model.optimizer})
        other, again = build(2)
        again.optimizer.build(again.trainable_variables)
        hk.checkpoint.restore(shared_path / "saved", {"model": again, "optimizer": again.optimizer})
        for one in (model, again):
            one.fit(ids, y, epochs=2, verbose=0, shuffle=False)
        same_values(other.get_weights(), layer.get_weights())
        assert hk.compare_variables(again.optimizer.variables)
    finally:
        keras.config.set_dtype_policy("float32")


def test_optimizers_that_a_table_cannot_have_are_refused(rank, size):
    for bad in (
        hk.DistributedOptimizer(keras.optimizers.SGD()),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        0.1,
        "no such",
    ):
        with pytest.raises(TypeError, match="optimizer of table 't': got"):
            Table("t", 3, 2, optimizer=bad)
    layer = hk.layers.ShardedEmbeddingCollection([Table("t", 9, 2, optimizer="adagrad")], {"t": "row"})
    layer.build()
    for options, said in (
        ({"accumulate_steps": 2}, "accumulate_steps: got 2"),
        ({"shard_states": True}, "shard_states"),
    ):
        with pytest.raises(ValueError, match=f"{said}.*tables that have their own optimizer"):
            hk.DistributedOptimizer(keras.optimizers.SGD(), **options).build(layer.trainable_variables)
    lamb = hk.layers.ShardedEmbeddingCollection([Table("t", 9, 2, optimizer=keras.optimizers.Lamb())], {"t": "row"})
    lamb.build()
    with pytest.raises(ValueError, match="optimizer: got Lamb"):
        hk.DistributedOptimizer(keras.optimizers.SGD()).build(lamb.trainable_variables)
    # The reverse is allowed: the model's optimizer does not see the table.
    hk.DistributedOptimizer(keras.optimizers.Lamb()).build([*layer.trainable_variables, keras.Variable([1.0])])
    if size > 1:
        table = Table("t", 9, 2, optimizer=keras.optimizers.SGD(0.1 * (1 + rank)))
        with pytest.raises(hk.CollectiveMismatchError, match="tables"):
            hk.layers.ShardedEmbeddingCollection([table], {"t": "row"}).build()
