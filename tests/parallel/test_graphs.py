"""Collectives inside graphs: ranks match them by what the program does, not by TensorFlow's node names."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit as hk
from hvdkit.watchdog.flight_recorder import FlightReader, recorder

pytestmark = pytest.mark.core(2)


def test_two_calls_in_one_function_do_not_meet(rank, size):
    """As in a GAN's step, with two models, two tapes and two optimizers."""

    @tf.function
    def step(a, b):
        first = hk.average_gradients([a, None], op=hk.Sum)
        second = hk.average_gradients([b], op=hk.Sum)
        return first[0], second[0], hk.allreduce(a, hk.Max), hk.allreduce(b, hk.Max)

    total = sum(range(size))
    results = step(tf.fill([3], float(rank)), tf.fill([3], 10.0 * rank))
    assert [r.numpy().tolist() for r in results] == [[v] * 3 for v in (total, 10 * total, size - 1, 10 * (size - 1))]


def test_gradients_of_tensors_in_a_function_that_one_rank_traces_again(rank, size):
    @tf.function
    def step(x, rows):
        with hk.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * x) * tf.reduce_mean(rows)
        return tape.gradient(loss, [x])[0]

    for rows in (3, 3 + (rank == size - 1)):
        assert step(tf.constant([1.0, 2.0]), tf.ones([rows])).numpy().tolist() == [2.0, 4.0]


def test_name_scopes_and_layers_may_differ_between_ranks(rank, size):
    """A chief that created one model and optimizer more than its peers must not wait for them."""
    if rank == 0:
        extra = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        extra.compile(keras.optimizers.Adam(), "mse")
        extra.train_on_batch(np.ones((2, 3)), np.ones((2, 2)))
    layer, optimizer = keras.layers.Dense(2), hk.DistributedOptimizer(keras.optimizers.Adam())
    layer.build((None, 3))
    hk.broadcast_variables(layer.variables)

    @tf.function
    def train_step(x):
        with tf.name_scope(f"tower_{rank}"), tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x) ** 2)
        with tf.name_scope(f"update_{rank}"):
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return hk.allreduce(loss)

    for _ in range(2):
        train_step(tf.ones([2, 3]) * (rank + 1))
    assert hk.compare_variables(layer.variables)


def _private_step(x):
    return hk.allreduce(x, hk.Sum)


def test_any_name_of_a_function(size):
    for function in (_private_step, lambda x: hk.allreduce(x, hk.Sum)):
        assert float(tf.function(function, autograph=False)(tf.constant(1.0))) == size


def test_one_function_called_twice_at_once(rank, size):
    """Both calls run the same nodes, and neither waits for the other's result."""
    inner = tf.function(lambda x: hk.allreduce(x, hk.Sum))

    @tf.function
    def outer(a, b):
        return inner(a), inner(b)

    for _ in range(20):
        one, ten = outer(tf.constant(1.0 + rank), tf.constant(10.0 * rank))
        assert (float(one), float(ten)) == (size * (size + 1) / 2, 10 * sum(range(size)))


def test_a_function_with_variables_called_twice_at_once(rank, size):
    """TensorFlow orders calls of functions that write to variables, but not of those that only read them."""
    weight = tf.Variable(tf.fill([50_000], 1.0 + rank))
    inner = tf.function(lambda x: hk.allreduce(x * weight, hk.Sum))

    @tf.function
    def outer(x):
        with tf.GradientTape() as tape:
            one, ten = inner(x), inner(10 * x)
            loss = tf.reduce_sum(one) + tf.reduce_sum(ten * one)
        return one[0], ten[0], tape.gradient(loss, weight)[0]

    total = size * (size + 1) / 2
    for _ in range(20):
        found = [float(x) for x in outer(tf.ones([50_000]))]
        assert found == [total, 10 * total, size * (1 + 20 * total)]


def test_loops_whose_turns_do_not_depend_on_each_other(rank, size):
    @tf.function
    def loop(n):
        results = tf.TensorArray(tf.float32, size=n)
        for i in tf.range(n):
            results = results.write(i, hk.allreduce(tf.cast(i, tf.float32) + rank, hk.Sum))
        return results.stack()

    expected = [size * i + sum(range(size)) for i in range(30)]
    assert loop(tf.constant(30)).numpy().tolist() == expected
    mapped = tf.function(lambda x: tf.map_fn(lambda v: hk.allreduce(v, hk.Sum), x, parallel_iterations=8))
    assert mapped(tf.range(30.0) + rank).numpy().tolist() == expected


@pytest.mark.ranks(2, 3)
def test_branches_that_all_ranks_take_alike(rank, size):
    @tf.function
    def step(flag, x):
        return tf.cond(flag, lambda: hk.allreduce(x, hk.Sum), lambda: hk.allreduce(x, hk.Max))

    assert float(step(tf.constant(True), tf.constant(float(rank)))) == sum(range(size))
    assert float(step(tf.constant(False), tf.constant(float(rank)))) == size - 1


def test_constants_are_not_reduced_once_and_for_all(rank, size):
    """TensorFlow would constant-fold such a collective instead of running it in the steps."""
    step = tf.function(lambda: (hk.allreduce(tf.constant([1.0, 2.0]), hk.Sum), hk.allreduce(np.float32(rank), hk.Max)))
    for _ in range(3):
        constant, highest = step()
        assert constant.numpy().tolist() == [size, 2 * size] and float(highest) == size - 1


@pytest.mark.ranks(2, 3)
def test_a_last_batch_that_is_smaller_on_one_rank(rank, size):
    """That rank retraces its step, with another constant weight; its peers do not."""
    w = tf.Variable([2.0])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(w * x)
        (grad,) = hk.average_gradients(tape.gradient(loss, [w]), weight=x.shape[0])
        return grad, hk.allgather(x), hk.alltoall(x, splits=[x.shape[0]] + [0] * (size - 1))[1]

    for n in (4, 4, 3, 4):
        sizes = [n if r == size - 1 else 4 for r in range(size)]
        batches = [np.arange(s, dtype=np.float32) + r for r, s in enumerate(sizes)]
        grad, gathered, counts = step(tf.constant(batches[rank]))
        np.testing.assert_allclose(grad, [np.concatenate(batches).mean()], rtol=1e-6)
        np.testing.assert_array_equal(gathered, np.concatenate(batches))
        assert counts.numpy().tolist() == (sizes if rank == 0 else [0] * size)


def test_results_that_only_some_ranks_use(rank, size):
    """On ranks that do not use the result, the graph must still contain the collective."""

    @tf.function
    def step(x):
        total = hk.allreduce(x, hk.Sum)
        everything = hk.allgather(x)
        if rank == 0:
            return total[0] + tf.reduce_sum(everything)
        return x[0]

    assert float(step(tf.constant([float(rank)]))) == (2 * sum(range(size)) if rank == 0 else rank)


def test_xla_is_refused_with_the_remedy():
    for call in (
        hk.allreduce,
        hk.allgather,
        lambda x: hk.average_gradients([x])[0],
        lambda x: hk.average_gradients([x], weight=2.0, compression="bf16")[0],
    ):
        with pytest.raises(hk.HvdkitError, match="jit_compile=False"):
            tf.function(call, jit_compile=True, autograph=False)(tf.ones([3]))


def test_a_function_traced_again_around_one_that_is_not(rank, size):
    """A smaller last batch retraces the outer function on one rank only; the inner one keeps its first trace."""

    @tf.function
    def inner(a):
        return hk.allreduce(a, hk.Sum)

    @tf.function
    def outer(a, b):
        return inner(a), hk.allreduce(tf.reduce_sum(b), hk.Sum)

    for length in (4, 3, 4):
        mine = length if rank == size - 1 else 4
        one, total = outer(tf.constant(1.0), tf.ones([mine]))
        assert float(one) == size and float(total) == 4 * (size - 1) + length


def test_a_bad_weight_in_a_graph_is_not_hidden(rank, size):
    step = tf.function(lambda w: hk.average_gradients([tf.ones([2])], weight=w)[0])
    for bad in (np.nan, -1.0):
        assert np.isnan(step(tf.constant(bad if rank == size - 1 else 1.0)).numpy()).all()


def test_the_flight_recorder_reads_graphs_that_have_run_and_no_others(monkeypatch, size):
    """TensorFlow logs a warning when a missing variable is read."""
    read = tf.raw_ops.ReadVariableOp

    def only_existing(resource, dtype):
        assert tf.raw_ops.VarIsInitializedOp(resource=resource)
        return read(resource=resource, dtype=dtype)

    monkeypatch.setattr(tf.raw_ops, "ReadVariableOp", only_existing)
    step = tf.function(lambda x: hk.allreduce(x, hk.Sum))
    traced = step.get_concrete_function(tf.TensorSpec([5], tf.float32))
    recorder().sampler()
    before = [one.number for one in _records() if "float32(5,)" in one.what]
    traced(tf.ones([5]))
    recorder().sampler()
    added = [one for one in _records() if "float32(5,)" in one.what and one.number not in before]
    assert [one.end is not None and one.end >= one.start for one in added] == [True] * (size > 1)


def test_fits_do_not_make_tensorflow_warn_of_retracing(monkeypatch):
    """TensorFlow warns if a function is created again and again."""
    from hvdkit.keras.data_end import report_end_of_data

    logged = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *_: logged.append(text))
    for _ in range(8):
        report_end_of_data()
    assert not logged


def _records():
    return FlightReader(recorder().file).records()
