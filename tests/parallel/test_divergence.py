"""The detector of diverged ranks: no error while ranks are equal; otherwise an error with rank, variable and step."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit as hk
from hvdkit import cluster
from hvdkit.supervisor.divergence import DivergenceDetector, replicated

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.core(2)]


def trained(**options):
    """Return a model and its optimizer with nonzero state, equal on all ranks."""
    keras.utils.clear_session()  # names are numbered alike, whatever each rank built before
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(0.1), **options)
    optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(4)
    for _ in range(3):
        optimizer.apply([tf.constant(rng.normal(size=v.shape), v.dtype) for v in model.trainable_variables])
    return model, optimizer


def flip_one_bit(variable, place):
    values = variable.numpy().copy()
    values.reshape(-1).view(np.uint32)[place] ^= 1
    variable.assign(values)


def error_on_every_rank(detector, step):
    with pytest.raises(hk.CollectiveMismatchError) as caught:
        detector.check(step)
    assert len(set(hk.allgather_object(str(caught.value)))) == 1
    return str(caught.value)


class Counting:
    """An exchange that counts its messages."""

    def __init__(self, exchange):
        self.exchange, self.sent = exchange, []
        self.ranks, self.size = exchange.ranks, exchange.size

    def allgather_bytes(self, data, name):
        self.sent.append(len(data))
        return self.exchange.allgather_bytes(data, name)


def test_equal_ranks_exchange_a_digest_every_so_many_steps(size, monkeypatch):
    model, optimizer = trained()
    counting = Counting(cluster.exchange())
    monkeypatch.setattr(cluster, "exchange", lambda: counting)
    detector = DivergenceDetector(lambda: replicated(model, optimizer), every=4)
    due = []
    for step in [*range(1, 13), 15, 17, 18, 30]:  # with gaps
        before = len(counting.sent)
        detector.check(step)
        if len(counting.sent) > before:
            due.append(step)
    assert due == [4, 8, 12, 17, 30]
    assert len(counting.sent) == len(due) and all(sent < 100 for sent in counting.sent)


@pytest.mark.parametrize("odd", ["last", "chief"])
def test_one_bit_of_one_slot_names_rank_variable_and_steps(odd, rank, size):
    model, optimizer = trained()
    variables = replicated(model, optimizer)
    number = next(n for n, v in enumerate(variables) if "momentum" in v.path and "kernel" in v.path)
    detector = DivergenceDetector(lambda: replicated(model, optimizer), every=5)
    culprit = size - 1 if odd == "last" else 0
    for step in range(1, 15):
        if step == 12 and rank == culprit:
            flip_one_bit(variables[number], 7)
        detector.check(step)
    message = error_on_every_rank(detector, 15)
    named = max(culprit, 1) if size == 2 else culprit  # with two ranks, rank 0 is right
    first = variables[number].path
    assert f"different values in 1 of {len(variables)} variables, the first {first}, on rank {named}, " in message
    assert "first known to differ at step 15, last known equal at step 10;" in message
    if rank == culprit:
        flip_one_bit(variables[number], 7)
    detector.check(20)


def test_without_a_majority_ranks_differ_from_rank_0(rank, size):
    variables = [tf.Variable([1.0]), tf.Variable([float(rank)], name="own"), tf.Variable([rank // 2])]
    detector = DivergenceDetector(variables, every=1)
    message = error_on_every_rank(detector, 1)
    others = {2: "", 3: " (rank 2 also differs)", 4: " (ranks 2, 3 also differ)"}[size]
    assert f"1 of 3 variables, the first own:0, on rank 1{others}, expected equal values, as on rank 0;" in message
    assert "first known to differ at step 1, " in message
    assert "they were not compared before" in message


def test_another_number_of_variables(rank, size):
    variables = [tf.Variable([1.0], name=f"v{n}") for n in range(4 if rank == size - 1 else 3)]
    detector = DivergenceDetector(variables, every=1)
    message = error_on_every_rank(detector, 1)
    first = "different values in 1 of 4 variables, the first v3:0,"
    assert f"got 4 variables, and {first} on rank {size - 1}, expected 3, as on rank 0" in message


def test_ranks_at_different_steps_are_told_so(rank, size):
    detector = DivergenceDetector([tf.Variable(1.0)], every=1)
    message = error_on_every_rank(detector, 1 + rank)
    assert "the step: got 2 on rank 1" in message and "expected 1, as on rank 0;" in message


def test_gradients_added_up_locally_do_not_count(rank, size):
    """Halfway through accumulate_steps each rank has different sums; loss scales are equal and compared."""
    keras.utils.clear_session()  # names are numbered alike, whatever each rank built before
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer = hk.DistributedOptimizer(inner, accumulate_steps=2)
    optimizer.build(model.trainable_variables)
    names = {variable.path.rpartition("/")[2] for variable in replicated(model, optimizer)}
    assert {"dynamic_scale", "step_counter", "iteration", "learning_rate", "kernel"} <= names
    detector = DivergenceDetector(lambda: replicated(model, optimizer), every=1)
    for step in range(1, 4):
        optimizer.apply([tf.fill(v.shape, float(rank + step)) for v in model.trainable_variables])
        detector.check(step)
    sums = optimizer.inner_optimizer._accumulated_gradients
    assert len({np.array(sums[0]).tobytes() for sums in hk.allgather_object([v.numpy() for v in sums])}) == size
    assert len(replicated(model, optimizer)) == len(model.trainable_variables + optimizer.variables) - len(sums)


def test_normalization_and_dropout_of_each_rank_do_not_count(rank):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model(np.full((5, 4), rank, "f4"), training=True)
    DivergenceDetector(replicated(model, None), every=1).check(1)
    assert replicated(None, None) == []


def test_a_nan_equals_itself(rank, size):
    DivergenceDetector([tf.Variable([np.nan, 0.0])], every=1).check(1)
    zero = tf.Variable([np.nan, -0.0 if rank == size - 1 else 0.0])
    error_on_every_rank(DivergenceDetector([zero], every=1), 1)
