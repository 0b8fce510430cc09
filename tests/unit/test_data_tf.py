"""hvdkit.data with TensorFlow: a tf.data.Dataset as the source, and batches for Keras fit."""

import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cases import case
from helpers.pairwise import pairwise
from helpers.tiers import after_core

from hvdkit.data import GlobalBatches, arrays, keras_dataset
from hvdkit.data.arrays import ArraySource

OPTIONS = [{}, {"shuffle_seed": 4, "shuffle_buffer": 8}, {"shuffle_seed": 4}]


def unknown_length(n):
    return tf.data.Dataset.range(n).filter(lambda x: x >= 0)


def run(dataset_of, batch_size, size, **options):
    """Return each step's concatenated local batches and masks; each rank has a separate dataset."""
    iterators = [GlobalBatches(dataset_of(), batch_size, rank=r, size=size, **options) for r in range(size)]
    steps = [[(batch.numpy(), it.mask, it.epoch) for batch in it] for it in iterators]
    return [
        (np.concatenate([batch for batch, _, _ in step]), np.concatenate([mask for _, mask, _ in step]), step[0][2])
        for step in zip(*steps, strict=True)
    ]


@pairwise(options=OPTIONS, n=[20, 23], source=[tf.data.Dataset.range, unknown_length], size=[2, 3, 5])
def test_stream_order_does_not_depend_on_the_number_of_ranks(source, n, options, size):
    one, many = (run(lambda: source(n), 5, ranks, epochs=2, **options) for ranks in (1, size))
    assert len(one) == 2 * -(-n // 5)
    for (batch, mask, epoch), (batch_1, mask_1, epoch_1) in zip(many, one, strict=True):
        np.testing.assert_array_equal(batch, batch_1)
        np.testing.assert_array_equal(mask, mask_1)
        assert epoch == epoch_1
    for epoch in range(2):
        seen = np.concatenate([batch[mask] for batch, mask, e in one if e == epoch])
        assert sorted(seen) == list(range(n))
        assert (list(seen) == list(range(n))) == (not options)
    if options:
        assert not np.array_equal(one[0][0], one[len(one) // 2][0]), "epochs are shuffled alike"


def test_stream_drop_and_filler():
    dropped = run(lambda: unknown_length(23), 5, 2, epochs=1, remainder="drop")
    assert [len(batch) for batch, _, _ in dropped] == [5] * 4 and all(mask.all() for _, mask, _ in dropped)
    padded = run(lambda: unknown_length(22), 5, 2, epochs=1)
    assert padded[-1][0].tolist() == [20, 21, 20, 21, 20]
    assert padded[-1][1].tolist() == [True, True, False, False, False]


def test_shuffle_does_not_depend_on_the_global_seed():
    orders = []
    for seed in (1, 2):
        tf.random.set_seed(seed)
        orders.append(run(lambda: tf.data.Dataset.range(20), 5, 1, epochs=1, shuffle_seed=3)[0][0].tolist())
        after = tf.random.uniform([]).numpy()
        tf.random.set_seed(seed)
        assert after == tf.random.uniform([]).numpy(), "the caller's random numbers changed"
    assert orders[0] == orders[1]


@pairwise(options=OPTIONS, source=[tf.data.Dataset.range, unknown_length], steps=[(0, 7), (2, 5)])
def test_stream_restore_skips_forward(source, options, steps):
    whole = GlobalBatches(source(23), 5, epochs=2, rank=0, size=1, **options)
    states, batches = [whole.state], []
    for number, batch in enumerate(whole, 1):
        assert whole.step == number
        batches.append(batch.numpy())
        states.append(whole.state)
    assert len(batches) == 10
    for done in steps:
        with case(done=done):
            halves = [GlobalBatches(source(23), 5, epochs=2, rank=r, size=2, **options) for r in range(2)]
            for half in halves:
                half.restore(states[done])
                assert half.step == done
            rest = [np.concatenate(parts) for parts in zip(*[list(half) for half in halves], strict=True)]
            np.testing.assert_array_equal(rest, batches[done:])


def test_map_runs_on_the_local_rows_only_and_structures_pass():
    calls = []

    def count(x):
        calls.append(int(x))
        return x

    def decode(example):
        x = tf.py_function(count, [example["x"]], tf.int64)
        return tf.fill([2], tf.ensure_shape(x, [])), example["name"]

    dataset = tf.data.Dataset.range(12).map(lambda i: {"x": i, "name": tf.strings.as_string(i)})
    it = GlobalBatches(dataset, 6, epochs=1, map_fn=decode, with_sample_weight=True, rank=1, size=3)
    batches = list(it)
    assert sorted(calls) == [2, 3, 8, 9]
    x, name, weight = batches[1]
    assert x.numpy().tolist() == [[8, 8], [9, 9]] and name.numpy().tolist() == [b"8", b"9"]
    assert weight.tolist() == [1, 1]


def test_examples_of_unequal_shape_before_the_map():
    dataset = tf.data.Dataset.range(1, 7).map(lambda n: tf.range(n))
    it = GlobalBatches(dataset, 3, epochs=1, map_fn=lambda x: tf.reduce_sum(x), rank=0, size=1)
    assert [batch.numpy().tolist() for batch in it] == [[0, 1, 3], [6, 10, 15]]


def test_ragged_and_sparse_examples():
    ragged = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    dataset = tf.data.Dataset.from_tensor_slices({"ragged": ragged, "sparse": tf.sparse.eye(5)})
    batches = list(GlobalBatches(dataset, 4, epochs=1, rank=1, size=2))
    assert [batch["ragged"].to_list() for batch in batches] == [[[], [4, 5, 6]], [[7], [7]]]
    np.testing.assert_array_equal(tf.sparse.to_dense(batches[0]["sparse"]), np.eye(5)[2:4])


def test_endless_stream_has_one_epoch():
    it = GlobalBatches(tf.data.Dataset.range(5).repeat(), 4, rank=0, size=1)
    assert [next(it).numpy().tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]
    again = GlobalBatches(tf.data.Dataset.range(5).repeat(), 4, rank=0, size=1)
    again.restore(it.state)
    assert next(again).numpy().tolist() == [2, 3, 4, 0]
    assert again.epoch == 0 and again.steps_per_epoch is None


def test_fingerprint_of_a_stream():
    def fingerprint(first):
        dataset = tf.data.Dataset.from_tensor_slices([[first, "b" * 40], ["c", "d"]])
        return GlobalBatches(dataset, 2, rank=0, size=1).fingerprint()

    assert fingerprint("a" * 40) == fingerprint("a" * 40) != fingerprint("z" * 40)


def test_streams_that_cannot_be_batched():
    empty = tf.data.Dataset.range(0)
    with pytest.raises(ValueError, match="empty"):
        GlobalBatches(empty, 2, rank=0, size=1)
    with pytest.raises(ValueError, match="at least one batch of 2"):
        next(GlobalBatches(empty.filter(lambda x: x > 0), 2, rank=0, size=1))
    with pytest.raises(ValueError, match="at least one batch of 9"):
        next(GlobalBatches(unknown_length(8), 9, remainder="drop", rank=0, size=1))


def test_a_stream_that_changes_its_length_is_refused():
    lengths = iter([7, 11, 3])

    def examples():
        yield from range(next(lengths))

    dataset = tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec([], tf.int64))
    it = GlobalBatches(dataset, 4, rank=0, size=1)
    with pytest.raises(ValueError, match="stream of more batches in epoch 1, expected 2"):
        list(it)
    it.restore(it.state_at(2))
    with pytest.raises(ValueError, match="stream of 1 batches in epoch 1, expected 2"):
        list(it)


def test_an_error_in_the_stream_is_not_the_end_of_an_epoch():
    dataset = tf.data.Dataset.range(8).map(lambda x: tf.debugging.check_numerics(1.0 / tf.cast(x - 5, tf.float32), "x"))
    it = GlobalBatches(dataset, 2, epochs=1, rank=0, size=1)
    next(it), next(it)
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError):
            next(it)


# ---- Keras ---------------------------------------------------------------------------------------------------------


def linear_data(n=37):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    return x, (x @ [[1.0], [2.0], [3.0]] + 0.1 * rng.normal(size=(n, 1))).astype(np.float32)


def fitted(dataset, epochs):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse", jit_compile=False)
    random.seed()  # the order of fit's own shuffle must not matter
    model.fit(dataset, epochs=epochs, verbose=0)
    return model.get_weights()[0]


@pytest.mark.parametrize("start_and_most", after_core([(0, 16), (3, 16), (3, 3), (3, 1)], but=[(3, 16)]))
def test_fit_sees_the_batches_of_the_loop(start_and_most, monkeypatch):
    """Also if TensorFlow gets several batches at once, fewer at an epoch's end, or one at a time, as large ones."""
    start, most = start_and_most
    monkeypatch.setattr(keras_dataset, "_MOST_AT_ONCE", most)
    x, y = linear_data()
    options = {"shuffle_seed": 1, "rank": 0, "size": 1}
    loop = GlobalBatches((x, y), 10, **options)
    loop.restore(loop.state_at(start))
    real = [tuple(rows[loop.mask] for rows in next(loop)) for _ in range(12)]
    expected = fitted((batch for batch in real), epochs=1)
    batches = GlobalBatches((x, y), 10, **options)
    batches.restore(batches.state_at(start))
    dataset = batches.as_keras()
    assert len(dataset) == 4
    np.testing.assert_allclose(fitted(dataset, epochs=3), expected, rtol=1e-5)
    assert batches.step == start, "fit moved the iterator"
    assert batches.state_at(start + 12) == loop.state


def test_small_batches_are_read_several_at_once(monkeypatch):
    """Python is called once for up to 16 small batches, and once for each large one."""
    reads, read = [], ArraySource.read
    monkeypatch.setattr(ArraySource, "read", lambda self, indices: reads.append(indices.size) or read(self, indices))
    x = np.zeros((40 * 8, 4), np.float32)
    dataset = GlobalBatches((x, x), 8, rank=0, size=1).as_keras()
    reads.clear()
    assert len(list(dataset)) == 40 and reads == [16 * 8, 16 * 8, 8 * 8]
    large = np.zeros((6 * 64, 1000, 3), np.float32)
    dataset = GlobalBatches((large, large[:, 0]), 64, rank=0, size=1).as_keras()
    reads.clear()
    assert len(list(dataset)) == 6 and reads == [64] * 6


def test_strings_and_numbers_that_dlpack_lacks_reach_fit_and_the_loop():
    words, flags = np.array(["a", "bcd", "ef", "g"] * 5), np.arange(20) % 2 == 0
    batches = GlobalBatches(({"words": words, "flags": flags}, np.arange(20.0)), 4, as_tensors=True, rank=0, size=1)
    for x, y in (next(iter(batches.as_keras()))[:2], next(batches)):
        assert x["words"].numpy().tolist() == [b"a", b"bcd", b"ef", b"g"]
        assert x["flags"].numpy().tolist() == [True, False, True, False] and y.numpy().tolist() == [0, 1, 2, 3]


def test_tensors_are_made_without_a_copy(monkeypatch):
    """TensorFlow uses the memory into which the rows were read, and the source data do not change."""
    made, make = [], arrays.aligned_empty
    monkeypatch.setattr(arrays, "aligned_empty", lambda *kind: made.append(make(*kind)) or made[-1])
    data = np.arange(60.0, dtype=np.float32).reshape(20, 3)
    batches = GlobalBatches((data, np.arange(20)), 8, shuffle_seed=0, as_tensors=True, rank=0, size=2)
    made.clear()
    x, y = next(batches)
    assert [array.ctypes.data % 64 for array in made] == [0, 0]
    made[0][0] = made[1][0] = 77
    assert x.numpy()[0].tolist() == [77] * 3 and y.numpy()[0] == 77
    assert 77 not in data and isinstance(batches.sample_weight, tf.Tensor)
    plain = GlobalBatches((data, np.arange(20)), 8, shuffle_seed=0, rank=0, size=2)
    next(plain)
    for (tensors, numbers), (rows, others) in zip(itertools.islice(batches, 7), plain, strict=False):
        assert isinstance(tensors, tf.Tensor) and isinstance(rows, np.ndarray)
        np.testing.assert_array_equal(tensors, rows)
        np.testing.assert_array_equal(numbers, others)
        np.testing.assert_array_equal(batches.sample_weight, plain.sample_weight)


@pytest.mark.parametrize("most", [16, 3, 1])
def test_passes_read_at_the_same_time_are_each_their_own(most, monkeypatch):
    """More passes than readers kept open; the pass that is abandoned leaves no trace in the others."""
    monkeypatch.setattr(keras_dataset, "_MOST_AT_ONCE", most)
    monkeypatch.setattr(keras_dataset, "_OPEN_READERS", 2)
    x, y = linear_data()
    batches = GlobalBatches((x, y), 10, shuffle_seed=1, rank=0, size=1)
    batches.restore(batches.state_at(3))
    loop = itertools.islice(GlobalBatches((x, y), 10, shuffle_seed=1, rank=0, size=1), 3, 3 + 5 * 4)
    expected = [rows for rows, _ in loop]
    dataset = batches.as_keras()
    assert np.array_equal(next(iter(dataset))[0], expected[0])
    passes = zip(*zip(*[dataset] * 4, strict=True), strict=True)
    np.testing.assert_array_equal([rows for one in passes for rows, _, _ in one], expected[4:])


def test_as_keras_leaves_the_memory_allocator_alone():
    """TensorFlow's generators make the C library return memory to the system at once, permanently: steps get slower."""
    x, y = linear_data()
    dataset = GlobalBatches((x, y), 10, rank=0, size=1).as_keras()
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor, external_state_policy=policy.value, strip_device_assignment=False
    )
    kinds = [node.op for node in tf.compat.v1.GraphDef.FromString(graph.numpy()).node]
    assert "ScanDataset" in kinds and "GeneratorDataset" not in kinds
    assert kinds.count("PrefetchDatasetV2") + kinds.count("PrefetchDataset") == 1, "batches are read ahead once"


def test_as_keras_structures_and_streams():
    x, y = linear_data(20)
    nested = GlobalBatches(({"a": x, "b": [x, x]}, y), 6, rank=0, size=1).as_keras()
    inputs, _, weight = next(iter(nested))
    assert inputs["b"][1].shape == (6, 3) and weight.shape == (6,)
    stream = tf.data.Dataset.from_tensor_slices((x, y))
    arrays = list(GlobalBatches((x, y), 6, remainder="drop", rank=1, size=2).as_keras())
    streamed = list(GlobalBatches(stream, 6, remainder="drop", rank=1, size=2).as_keras())
    for one, other in zip(arrays, streamed, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_as_keras_refuses_what_it_cannot_do():
    with pytest.raises(TypeError, match=r"a list of 2, expected x, \(x, y\)"):
        GlobalBatches([np.zeros(4), np.zeros(4)], 2, rank=0, size=1).as_keras()
    with pytest.raises(ValueError, match="data without labels"):
        GlobalBatches(np.zeros(5), 2, rank=0, size=1).as_keras()
    short = GlobalBatches((np.zeros((4, 3), np.float32), np.zeros((4, 1))), 2, epochs=1, rank=0, size=1)
    with pytest.raises(Exception, match="set GlobalBatches"):
        fitted(short.as_keras(), epochs=2)
