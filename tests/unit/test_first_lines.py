"""The first line of an error says what went wrong and where, also if TensorFlow raises it."""

from __future__ import annotations

import pytest
import tensorflow as tf

from hvdkit.collectives.graphs import op_name
from hvdkit.errors import ClusterError
from hvdkit.watchdog.ending import is_victim
from hvdkit.watchdog.flight_recorder import recorder
from hvdkit.watchdog.uncaught import _traceback, cause_of, ended_a_step, with_cause_first


def load(path):
    raise FileNotFoundError(2, "No such file or directory", path.decode())


def error_of(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("no error")


@pytest.fixture(scope="module")
def graph_error():
    """Return the error of a file that is missing, read in a model's step by Keras."""
    import keras

    data = tf.data.Dataset.from_tensors("part-3.csv").map(lambda path: tf.numpy_function(load, [path], tf.float32))
    data = data.map(lambda x: (tf.ensure_shape(x, [1, 1]), tf.ensure_shape(x, [1, 1])))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return error_of(lambda: model.fit(data, verbose=0))


def test_the_cause_comes_before_the_nodes_of_the_graph(graph_error):
    cause = "FileNotFoundError: [Errno 2] No such file or directory: 'part-3.csv'"
    assert cause not in str(graph_error).splitlines()[0]  # or this is not needed any more
    first = with_cause_first(graph_error, 1)
    assert type(first) is type(graph_error) and first.__traceback__ is graph_error.__traceback__
    line = str(first).splitlines()[0]
    assert line.startswith("rank 1: ") and cause in line
    assert cause_of(first) == cause_of(graph_error) and cause in cause_of(first)
    assert with_cause_first(first, 1) is first
    assert cause in _traceback(graph_error)[0]
    plain = ValueError("bad")
    assert with_cause_first(plain, 1) is plain


def test_an_error_that_another_rank_has_caused_is_known_by_its_cause():
    error = ClusterError("rank 1 on b failed: ValueError: bad")
    assert not is_victim(error)
    error.__cause__ = ClusterError("rank 1 left the job while rank 0 waited for it")
    assert is_victim(error)


def test_an_exception_of_a_graph_with_collectives_has_ended_a_step():
    @tf.function
    def inner(x):
        op_name("sum", None)
        return tf.numpy_function(load, [x], tf.float32)

    @tf.function
    def step(x):
        return inner(x)

    @tf.function
    def read(x):
        return tf.numpy_function(load, [x], tf.float32)

    graphs = recorder().graphs
    assert ended_a_step(error_of(step, tf.constant("a")), graphs) and "step" in graphs
    assert not ended_a_step(error_of(read, tf.constant("a")), graphs)
    assert not ended_a_step(error_of(load, b"a"), graphs)
