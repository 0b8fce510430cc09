"""Steps compiled by XLA whose shapes change, and differ between ranks: equal replicas, few compilations, no hang."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_nests
from helpers.tiers import at_night

import hvdkit as hk
from hvdkit.compiling import compiled_step, programs

layers, opts = keras.layers, keras.optimizers
RNG = np.random.default_rng(7)
X = RNG.normal(size=(50, 8)).astype("f4")
Y = X[:, :3].argmax(axis=1)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
pytestmark = pytest.mark.ranks(2)


def network(*more):
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), *more, layers.Dense(3)])


def batches(*sizes):
    """Return this rank's batches; each rank has its own order of sizes."""
    own = np.roll(sizes, hk.rank())
    return [(tf.constant(X[:rows]), tf.constant(Y[:rows])) for rows in own]


def loop(wrap, data, *more, divides=False):
    """Return the weights and logs of a user's loop."""
    keras.utils.set_random_seed(3)
    model = network(*more)
    optimizer = hk.DistributedOptimizer(opts.Adam(0.05))

    @wrap
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        total = hk.allreduce(loss, op=hk.Sum)
        return total / x.shape[0] if divides else total

    logs = [float(step(x, y)) for x, y in data]
    assert hk.compare_variables([*model.trainable_variables, *optimizer.variables])
    return [v.numpy() for v in model.trainable_variables], logs


@pytest.mark.nightly
@pytest.mark.parametrize("divides", [False, True])
def test_shapes_that_come_at_other_steps_on_other_ranks(divides):
    data = batches(12, 12, 12, 7, 5, 12, 3, 7)
    same_nests(loop(tf.function, data, divides=divides), loop(hk.compiled, data, divides=divides))


@pytest.fixture
def few_signatures(monkeypatch):
    monkeypatch.setattr(compiled_step, "MOST_SIGNATURES", 3)


@pytest.mark.nightly
def test_more_shapes_than_are_compiled(few_signatures):
    data = batches(*range(2, 8), 5)
    same_nests(loop(tf.function, data), loop(hk.compiled, data))
    dropped = [loop(wrap, data, layers.Dropout(0.3, seed=1)) for wrap in (tf.function, hk.compiled)]
    same_nests(*dropped)


def test_a_step_for_whose_shapes_no_other_can_be_traced(few_signatures):
    w = tf.Variable(tf.ones([8, 2]))

    def step(x):
        pieces = [x[row] for row in range(x.shape[0])]  # fails for an unknown number of rows
        y = tf.matmul(tf.stack(pieces), w)
        w.assign_sub(0.001 * hk.allreduce(tf.matmul(x, y, transpose_a=True)))
        return tf.reduce_sum(y)

    values = []
    for wrap in (tf.function, hk.compiled):
        w.assign(tf.ones([8, 2]))
        run = wrap(step)
        values.append([float(run(x)) for x, _ in batches(*range(1, 7))])
        assert hk.compare_variables([w])
    same_nests(*values)


@pytest.mark.parametrize("rank", at_night((0, -1), but=[-1]))
def test_a_later_shape_that_only_one_rank_cannot_compile(rank, monkeypatch, lines):
    data = batches(12, 12, 12, 7, 5, 12, 3, 7)
    plain = loop(tf.function, data)
    digest = programs._digest
    seen = []

    def fail(text):
        seen.append(text)
        if len(seen) > 2 and hk.rank() == rank % hk.size():  # not the two programs of the first shapes
            raise ValueError("cannot compile this shape")
        return digest(text)

    monkeypatch.setattr(programs, "_digest", fail)
    same_nests(plain, loop(hk.compiled, data))
    assert len(seen) > 2
    if hk.rank() == rank % hk.size():
        assert "not compiled for other shapes: a program: cannot compile this shape" in lines.text


def compilations(lines):
    """Return the numbers of programs, combinations of shapes, and seconds of the last line about them."""
    found = re.findall(r"compiled (\d+) programs? for (\d+) combinations? of shapes, in ([\d.]+) s", lines.text)
    number, shapes, seconds = found[-1]
    return int(number), int(shapes), float(seconds)


def test_ragged_batches_of_hk_fit_compile_few_programs(lines):
    keras.utils.set_random_seed(3)
    model = network()
    model.compile(opts.Adam(0.05), LOSS, jit_compile=True)
    hk.fit(model, X, Y, batch_size=12, epochs=4, verbose=0)  # four batches of 12 rows, and one of 2
    if hk.is_chief():
        number, shapes, seconds = compilations(lines)
        assert shapes == 2
        assert number == 3  # the pass for each of both, and one update
        assert seconds > 0


def test_the_update_is_compiled_once_for_all_shapes(few_signatures):
    step = None

    def wrap(function):
        nonlocal step
        step = compiled_step.CompiledStep(function)
        return step

    loop(wrap, batches(*range(2, 7)))
    assert step.signatures == compiled_step.MOST_SIGNATURES
    assert step.compilations == compiled_step.MOST_SIGNATURES + 1


@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("others", ["on", None])
def test_a_variable_that_differs_between_ranks(rank, others, monkeypatch):
    if hk.rank() == rank % hk.size():
        monkeypatch.setenv("HVDKIT_JIT_COMPILE", "off")
    elif others:
        monkeypatch.setenv("HVDKIT_JIT_COMPILE", others)
    with pytest.raises(hk.CollectiveMismatchError, match=r"HVDKIT_JIT_COMPILE: got (off|on|no value) on rank") as error:
        loop(hk.compiled, batches(4, 4))
    assert "set it to the same on every rank" in str(error.value)


def test_a_variable_that_switches_xla_off_on_all_ranks(monkeypatch, lines):
    monkeypatch.setenv("HVDKIT_JIT_COMPILE", "off")
    data = batches(4, 5, 4)
    same_nests(loop(tf.function, data), loop(hk.compiled, data))
    same_nests(loop(tf.function, data), loop(lambda step: hk.compiled(tf.function(step)), data))
    assert "XLA" not in lines.text

    @hk.compiled
    def step(data, scale=2.0, *, add=None):
        if tf.reduce_sum(data["x"]) > 0:  # AutoGraph
            return data["x"] * scale
        return data["x"] if add is None else data["x"] + add

    assert step({"x": np.ones(2, "f4")}, 3.0).numpy().tolist() == [3, 3]
    assert step({"x": -tf.ones([2])}, add=tf.constant(5.0)).numpy().tolist() == [4, 4]
