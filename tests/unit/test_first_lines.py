"""The first line of an error says what went wrong and where, also if TensorFlow raises it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.collectives.graphs import op_name
from hvdkit.errors import ClusterError
from hvdkit.watchdog.ending import is_interrupt, is_victim
from hvdkit.watchdog.flight_recorder import recorder
from hvdkit.watchdog.tracebacks import cause_of, ended_a_step, left_a_loop, report_lines, with_cause_first


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
    assert cause in report_lines(graph_error)[0]
    data = tf.data.Dataset.from_tensors("part-3.csv").map(lambda path: tf.numpy_function(load, [path], tf.float32))
    line = cause_of(error_of(next, iter(data)))
    assert line.startswith("Error in user-defined function") and cause in line
    plain = ValueError("bad")
    assert with_cause_first(plain, 1) is plain


LOOPS = """
def train():
    for batch in range(8):
        step(batch)

def caught_around_the_loop():
    try:
        for batch in range(8):
            step(batch)
            load(batch)
    except OSError as error:
        look(error)

def caught_around_a_function():
    try:
        train()
        load(8)
    except OSError as error:
        look(error)

def caught_in_the_loop():
    for batch in range(8):
        try:
            step(batch)
            load(batch)
        except OSError as error:
            look(error)

def caught_after_an_earlier_loop():
    for batch in range(8):
        step(batch)
    try:
        load(8)
    except OSError as error:
        look(error)
"""


@pytest.mark.parametrize(
    ("function", "fails_in", "left"),
    [
        ("caught_around_the_loop", "load", True),
        ("caught_around_the_loop", "step", True),
        ("caught_around_a_function", "step", True),
        ("caught_around_a_function", "load", False),
        ("caught_in_the_loop", "load", False),  # it may read the batch again
        ("caught_after_an_earlier_loop", "load", False),
    ],
)
def test_a_handler_outside_of_the_loop_has_left_it(tmp_path, function, fails_in, left):
    """The program in which a file is missing on one rank; ``look`` stands for the watchdog's thread."""
    callers, looks = {}, []

    def fail(name, batch):
        if name == "step":
            frame = sys._getframe(2)
            callers.setdefault(frame.f_code, set()).add(frame.f_lineno)
        if name == fails_in and batch in (5, 8):
            raise FileNotFoundError("part-3.csv")

    file = tmp_path / "train.py"
    file.write_text(LOOPS)
    program = {
        "step": lambda batch: fail("step", batch),
        "load": lambda batch: fail("load", batch),
        "look": lambda error: looks.append(left_a_loop(error, callers)),
    }
    exec(compile(LOOPS, str(file), "exec"), program)
    program[function]()
    assert looks == [left]


def test_the_cause_of_a_layers_error_is_its_own_message_without_colors():
    import keras

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    line = cause_of(error_of(lambda: model.fit(np.ones((4, 5)), np.ones((4, 2)), verbose=0)))
    assert line.startswith("Input 0") and ", 5) (Exception encountered when calling Sequential" in line, line
    assert "x1b" not in line and "\x1b" not in line


def test_an_error_that_another_rank_has_caused_is_known_by_its_cause():
    error = ClusterError("rank 1 on b failed: ValueError: bad")
    assert not is_victim(error)
    error.__cause__ = ClusterError("rank 1 left the job while rank 0 waited for it")
    assert is_victim(error)


def test_ctrl_c_is_known_where_pybind11_has_replaced_it():
    replaced = "MISMATCH of original and normalized active exception types: ORIGINAL UnknownError REPLACED BY "
    assert is_interrupt(KeyboardInterrupt())
    assert is_interrupt(RuntimeError(f"pybind11::error_already_set: {replaced}KeyboardInterrupt: <EMPTY MESSAGE>"))
    assert not is_interrupt(RuntimeError("bad"))


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
