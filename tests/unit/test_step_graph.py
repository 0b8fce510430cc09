"""Graphs of steps with programs for XLA, in one process: results, shared and dropped programs, and what XLA refuses."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.compiling import programs
from hvdkit.compiling.programs import StepGraph

SPECS = [tf.TensorSpec([4, 3], tf.float32)]
X = tf.constant(np.arange(12).reshape(4, 3), tf.float32)


def traced(variable):
    def step(x):
        text = tf.strings.as_string(tf.shape(x)[0])
        variable.assign_add(tf.reduce_mean(tf.matmul(x, tf.ones([3, 2]))))
        return {"sum": variable.read_value() + 1, "rows": text}

    return tf.function(step, autograph=False).get_concrete_function(*SPECS)


@pytest.fixture
def variable():
    return tf.Variable(1.0)


def step_graph(variable, shared=None):
    return StepGraph(traced(variable), SPECS, shared or {}, lambda: traced(variable))


def check_result(graph, variable):
    variable.assign(1.0)
    results = [graph([X]), tf.function(lambda x: graph([x]))(X)]  # called, and copied into another graph
    assert [float(each["sum"]) for each in results] == [1 + 16.5 + 1, 1 + 2 * 16.5 + 1]
    assert {each["rows"].numpy() for each in results} == {b"4"}


def test_a_program_computes_the_same_and_serves_later_graphs(variable):
    graph = step_graph(variable)
    check_result(graph, variable)
    assert len(graph.programs) == 1 and not graph.refused and any("AsString" in each for each in graph.outside)
    inside, total = graph.operations()
    assert 0 < inside < total
    assert graph.has_fixed_shapes and graph.levels_of_exchanges == (0, 0)
    [program] = graph.programs.values()
    later = step_graph(variable, {program.structure: program})
    [same] = later.programs.values()
    assert same.function is program.function and same.digest == program.digest
    check_result(later, variable)
    later.keep(set())
    assert (later.programs, later.dropped) == ({}, 1)
    check_result(later, variable)


def test_a_program_that_cannot_be_made_runs_uncompiled(variable, monkeypatch):
    def fail(text):
        raise ValueError("no such thing")

    monkeypatch.setattr(programs, "_digest", fail)
    graph = step_graph(variable)
    assert (graph.programs, graph.refused) == ({}, ["a program: no such thing"])
    check_result(graph, variable)


def test_a_graph_that_cannot_be_copied_runs_as_it_was_traced(variable, monkeypatch):
    def fail(*_, **__):
        raise ValueError("no copies")

    monkeypatch.setattr(programs, "Copies", fail)
    graph = step_graph(variable)
    assert (graph.programs, graph.outside, graph.operations()) == ({}, [], (0, 0))
    assert graph.refused == ["ValueError: no copies"]
    check_result(graph, variable)
