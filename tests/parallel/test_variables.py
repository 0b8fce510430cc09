"""Broadcast of variables: Keras's and TensorFlow's, of every dtype, and a model's other state."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values

import hvdkit as hk

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.core(1, 2)]

DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"]


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_every_dtype_and_shape_from_every_root(kind, rank, size):
    for root in range(size):
        made = []
        for dtype in [*DTYPES, "uint64", "bool"]:
            for shape in ([], [3], [0, 2], [70, 80]):
                value = tf.cast(tf.fill(shape, (rank + root) % 2 if dtype == "bool" else rank + 1), dtype)
                made.append(kind(value, dtype=dtype))
        hk.broadcast_variables(made, root)
        for variable in made:
            value = tf.convert_to_tensor(variable)
            expected = (2 * root) % 2 if value.dtype == tf.bool else root + 1
            assert (tf.cast(value, tf.int32) == expected).numpy().all(), variable
        assert hk.compare_variables(made)


def test_a_model_with_its_optimizer(rank):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    )
    optimizer = keras.optimizers.Adam(0.1 + rank)
    optimizer.build(model.trainable_variables)
    optimizer.apply([tf.random.normal(v.shape) for v in model.trainable_variables])
    everything = [*model.variables, *optimizer.variables]
    hk.broadcast_variables(everything)
    assert hk.compare_variables(everything)
    values = [v.numpy() for v in everything if v.name != "seed_generator_state"]
    for other in hk.allgather_object(values):
        assert all(map(np.array_equal, other, values))


def test_nothing_and_pieces_and_mixed_precision(rank, size):
    hk.broadcast_variables([])
    assert hk.compare_variables([])
    large = [tf.Variable(tf.fill([n], float(rank))) for n in (9_000_000, 9_000_000, 5)]  # 72 MB in 64 MB pieces
    hk.broadcast_variables(large, size - 1)
    assert all((v == size - 1.0).numpy().all() for v in large)
    zeros = tf.Variable([0.0, np.nan] if rank else [-0.0, np.nan])
    hk.broadcast_variables([zeros, tf.Variable(1.0)])
    assert np.signbit(zeros[0].numpy()), "equal numbers, but not bit for bit"
    layer = keras.layers.Dense(2, dtype="mixed_float16")
    layer.build((None, 3))
    layer.kernel.assign(np.full((3, 2), 1 + 2.0**-20 * (rank + 1), "f4"))
    hk.broadcast_variables(layer.variables)
    assert (layer.kernel.numpy() == np.float32(1 + 2.0**-20)).all(), "float16 was sent"


def test_a_difference_is_named(rank, size):
    same, other = tf.Variable([1.0], name="same"), tf.Variable([float(rank == size - 1 > 0)], name="other")
    assert hk.compare_variables([same])
    if size > 1:
        with pytest.raises(hk.CollectiveMismatchError, match=rf"other.*rank {size - 1}"):
            hk.compare_variables([same, other])


def test_names_may_differ_and_order_may_not(rank, size):
    a, b = tf.Variable([float(rank)], name=f"a_{rank}"), tf.Variable([[float(rank)]], name="b")
    hk.broadcast_variables([a, b], size - 1)
    assert float(a[0]) == float(b[0, 0]) == size - 1
    if size > 1:
        with pytest.raises(hk.CollectiveMismatchError):
            hk.broadcast_variables([a, b] if rank == 0 else [b, a])


@pytest.mark.parametrize("weighted", [False, True])
def test_a_tape_equals_the_global_batch(weighted, rank, size):
    """Uneven batches: with weights rank r has r examples, the chief none; otherwise two each."""
    counts = [r if weighted and size > 1 else 2 for r in range(size)]
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(sum(counts), 3)), rng.normal(size=(sum(counts), 1))
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])
    w, b = tf.Variable(rng.normal(size=(3, 1))), keras.Variable(np.zeros(1), dtype="float64")

    def loss_of(rows):
        return tf.reduce_mean(tf.square(x[rows] @ w + b - y[rows]))

    with tf.GradientTape() as tape:
        expected = tape.gradient(loss_of(slice(None)), [w, b.value])

    def around():
        with tf.GradientTape() as recorded:
            loss = loss_of(mine)
        weight = counts[rank] if weighted else None
        return hk.DistributedGradientTape(recorded, weight=weight).gradient(loss, [w, b.value])

    def within():
        with hk.DistributedGradientTape(tf.GradientTape(), weight=counts[rank] if weighted else None) as recording:
            loss = loss_of(mine)
        return recording.gradient(loss, [w, b])  # a Keras variable itself

    for results in (around(), within(), tf.function(around)(), tf.function(within)()):
        same_values(results, expected, rtol=1e-12, atol=1e-14)


def test_a_tape_keeps_the_structure_of_its_sources(rank, size):
    v = tf.Variable(2.0)
    with hk.DistributedGradientTape(tf.GradientTape(persistent=True), op=hk.Sum) as tape:
        loss = v * v * float(rank)
    total = 4.0 * sum(range(size))
    assert float(tape.gradient(loss, v)) == total
    assert {k: float(g) for k, g in tape.gradient(loss, {"a": v, "b": v}).items()} == {"a": total, "b": total}
    unused = tf.Variable(1.0)
    assert tape.gradient(loss, [unused]) == [None]
    zeros = tape.gradient(loss, (v, unused), unconnected_gradients=tf.UnconnectedGradients.ZERO)
    assert isinstance(zeros, tuple) and float(zeros[1]) == 0
    with pytest.raises(TypeError, match="tape"):
        hk.DistributedGradientTape(None)


def test_states_of_random_generators_stay_those_of_each_rank(rank, size):
    """Equal states would give equal dropout masks on all ranks."""
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    hk.broadcast_variables(model.variables)
    hk.compare_variables(model.variables)
    hk.compare_variables([v.value for v in model.variables])
    masks = hk.allgather_object(model.layers[0](np.ones((4, 8)), training=True).numpy())
    assert len({mask.tobytes() for mask in masks}) == size
