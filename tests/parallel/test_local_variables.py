"""Local variables differ by rank; their gradients are scaled as in one process, and they are never communicated."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values
from helpers.pairwise import pairwise

import hvdkit as hk
from hvdkit.sharding.shards import flat_shard_of, is_local

opts = keras.optimizers
STEPS, BATCH, WIDTH = 3, 12, 3


def model_of():
    """Return a weight shared by all ranks, and a head for each rank; rank r's starts at r + 1."""
    body = keras.Variable(np.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).astype("f4"), name="body")
    heads = [keras.Variable(np.full((WIDTH, 1), r + 1.0, "f4"), name=f"head_{r}") for r in range(hk.size())]
    return body, heads


def examples(step):
    rng = np.random.default_rng(step)
    return rng.normal(size=(BATCH, 4)).astype("f4"), rng.normal(size=(BATCH, 1)).astype("f4")


def rows_of(rank):
    return slice(rank * BATCH // hk.size(), (rank + 1) * BATCH // hk.size())


def errors(body, head, x, y):
    return tf.square(tf.matmul(tf.tanh(tf.matmul(x, body)), head) - y)


def alone(optimizer, op=hk.Average, clip=None, accumulate=1):
    """Train all heads in one process on the whole batch: each part of it goes through its rank's head."""
    body, heads = model_of()
    for step in range(0, STEPS * accumulate, accumulate):
        with tf.GradientTape() as tape:
            losses = []
            for part in range(accumulate):
                x, y = examples(step + part)
                losses += [errors(body, head, x[rows_of(r)], y[rows_of(r)]) for r, head in enumerate(heads)]
            losses = tf.concat(losses, 0)
            loss = tf.reduce_mean(losses) if op == hk.Average else tf.reduce_sum(losses)
        grads = tape.gradient(loss, [body.value, *[head.value for head in heads]])
        if clip:
            grads, _ = tf.clip_by_global_norm(grads, clip)
        optimizer.apply(grads, [body, *heads])
    return body, heads[hk.rank()]


def trained(optimizer, op=hk.Average, accumulate=1, tape_of=tf.GradientTape, graph=False):
    """Train on all ranks, each with its part of the batch and its own head."""
    body, heads = model_of()
    head = heads[hk.rank()]
    hk.register_local_variables(head)
    optimizer.build([body, head])

    def step(x, y):
        with tape_of() as tape:
            losses = errors(body, head, x, y)
            loss = tf.reduce_mean(losses) if op == hk.Average else tf.reduce_sum(losses)
            loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(loss, [body.value, head.value]), [body, head])

    step = tf.function(step) if graph else step
    for number in range(STEPS * accumulate):
        x, y = examples(number)
        step(tf.constant(x[rows_of(hk.rank())]), tf.constant(y[rows_of(hk.rank())]))
    return body, head


def assert_equal(ours, theirs, rtol=3e-5, atol=3e-6):
    same_values(ours, theirs, rtol=rtol, atol=atol)


@pairwise(
    name=["SGD", "Adam", "Lamb", "scaled"],
    op=[hk.Average, hk.Sum],
    clip=[None, 0.05],
    accumulate=[1, 2],
    shard_states=[False, True],
    graph=[False, True],
)
def test_equal_to_one_process_with_the_variables_of_all_ranks(name, op, clip, accumulate, shard_states, graph):
    makers = {
        "SGD": lambda: opts.SGD(0.05, momentum=0.9, weight_decay=0.1),
        "Adam": lambda: opts.Adam(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        "Lamb": lambda: opts.Lamb(0.05),
        "scaled": lambda: opts.LossScaleOptimizer(opts.SGD(0.05), initial_scale=8.0),
    }
    options = {"op": op, "clip_global_norm": clip, "accumulate_steps": accumulate}
    options["shard_states"] = shard_states and name != "Lamb"  # Lamb needs whole variables
    optimizer = hk.DistributedOptimizer(makers[name](), **options)
    plain = makers[name]() if name != "scaled" else opts.SGD(0.05)
    ours = trained(optimizer, op, accumulate, graph=graph)
    assert_equal(ours, alone(plain, op, clip, accumulate))
    hk.compare_variables(ours)
    slots = [v for v in optimizer.variables if is_local(v)]
    assert len(slots) == {"SGD": 1, "Adam": 3, "Lamb": 2, "scaled": 0}[name] + (accumulate > 1)
    assert not any(flat_shard_of(v) for v in slots)


@pytest.mark.core(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", [hk.Average, hk.Sum])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_scaled_and_stay_where_they_are(op, weighted, rank, size):
    """Dense gradients, repeated rows, and None; shapes differ between ranks."""
    local = [tf.Variable(tf.zeros([rank + 1])), tf.Variable(tf.zeros([4, 2])), tf.Variable(0.0)]
    shared = tf.Variable(tf.zeros([2]))
    hk.register_local_variables(local)
    rows = tf.IndexedSlices([[1.0, 2.0], [3.0, 4.0], [10.0, 10.0]], [1, 3, 1], [4, 2])
    grads = [tf.fill([rank + 1], rank + 1.0), rows if rank == 0 else None, None, tf.fill([2], rank + 1.0)]
    weights = [r + 2.0 for r in range(size)]
    w, total = (weights[rank], sum(weights)) if weighted else (1.0, size)
    factor = w / total if op == hk.Average else w

    def call():
        variables = [*local, shared]
        return hk.average_gradients(grads, op=op, weight=weights[rank] if weighted else None, variables=variables)

    for dense, sparse, nothing, combined in (call(), tf.function(call, autograph=False)()):
        np.testing.assert_allclose(dense, np.full(rank + 1, (rank + 1) * factor), rtol=1e-6)
        assert nothing is None and (sparse is None) == (rank > 0)
        if rank == 0:
            np.testing.assert_allclose(sparse.indices, [1, 3])
            np.testing.assert_allclose(sparse.values, np.array([[11.0, 12.0], [3.0, 4.0]]) * factor, rtol=1e-6)
        each = [(r + 1) * (weights[r] if weighted else 1) for r in range(size)]
        np.testing.assert_allclose(combined, np.full(2, sum(each) / (total if op == hk.Average else 1)), rtol=1e-6)


@pytest.mark.parametrize("weight", [None, 2.0])
def test_tapes(weight, rank, size):
    def gradients(wrap, mark):
        v, shared = tf.Variable(float(rank)), tf.Variable(1.0)
        with wrap(tf.GradientTape()) as tape:
            mark(tape, v)
            loss = (v + shared) * (rank + 1.0)
        return tape.gradient(loss, {"own": v, "shared": shared})

    layer = keras.layers.Dense(1)

    def of_layer(tape):
        return hk.PartialDistributedGradientTape(tape, local_layers=layer, weight=weight)

    options = {"weight": weight}
    expected = {"own": (rank + 1) / size, "shared": (size + 1) / 2}
    for mark in (lambda tape, v: tape.register_local_source(v), lambda _, v: hk.register_local_variables([v])):
        found = gradients(lambda tape: hk.DistributedGradientTape(tape, **options), mark)
        assert {key: float(g) for key, g in found.items()} == pytest.approx(expected)
    with of_layer(tf.GradientTape()) as tape:  # the layer is built while the tape records
        loss = tf.reduce_sum(layer(tf.ones([1, 2]) * (rank + 1.0)))
    kernel, bias = tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_allclose(kernel, np.full((2, 1), (rank + 1) / size), rtol=1e-6)
    np.testing.assert_allclose(bias, [1 / size], rtol=1e-6)
    assert all(map(is_local, layer.weights))


def test_only_replicated_gradients_travel(size):
    body, heads = model_of()
    optimizer = hk.DistributedOptimizer(opts.SGD(0.1))
    optimizer.register_local_var(heads[hk.rank()])
    optimizer.build([body, heads[hk.rank()]])

    @tf.function
    def step():
        optimizer.apply([body + 0.0, heads[hk.rank()] + 0.0], [body, heads[hk.rank()]])

    exchanges = [op for op in step.get_concrete_function().graph.get_operations() if op.type.startswith("Horovod")]
    assert [op.inputs[0].shape.num_elements() for op in exchanges] == ([4 * WIDTH] if size > 1 else [])


def test_neither_broadcast_nor_compared(rank, size):
    shared, own = keras.Variable([float(rank)]), keras.Variable([float(rank)])
    hk.register_local_variables(own)
    optimizer = hk.DistributedOptimizer(opts.Adam(0.1))
    optimizer.apply([tf.ones([1]), tf.fill([1], rank + 1.0)], [shared, own])
    before = own.numpy()
    hk.broadcast_variables([shared, own, *optimizer.variables], root=size - 1)
    np.testing.assert_array_equal(own.numpy(), before)
    hk.compare_variables([shared, own, *optimizer.variables])
    slots = [v for v in optimizer.variables if is_local(v)]
    assert len(slots) == 2
    np.testing.assert_allclose(slots[0], [0.1 * (rank + 1) / size], rtol=1e-6)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("shard_states", [False, True])
def test_a_checkpoint_has_the_values_of_each_rank(shard_states, shared_path, rank, size):
    def made():
        body, heads = model_of()
        hk.register_local_variables(heads[rank])
        optimizer = hk.DistributedOptimizer(opts.Adam(0.1, name="adam"), shard_states=shard_states)
        optimizer.build([body, heads[rank]])
        return optimizer, {"body": body, "head": heads[rank]}

    optimizer, weights = made()
    optimizer.apply([tf.ones([4, WIDTH]), tf.fill([WIDTH, 1], rank + 1.0)])
    path = hk.checkpoint.save(shared_path / "step-1", {"optimizer": optimizer, "weights": weights})
    kinds = {v.name: v.kind for v in hk.checkpoint.inspect(path).variables}
    assert kinds["weights/head"] == "per_rank" and kinds["weights/body"] == "replicated"
    assert sum(kind == "per_rank" for kind in kinds.values()) == 3
    again, others = made()
    hk.checkpoint.restore(path, {"optimizer": again, "weights": others})
    same_values([*others.values(), *again.variables], [*weights.values(), *optimizer.variables])
    plain = opts.SGD(0.1, momentum=0.9)
    plain.build(list(weights.values()))
    with pytest.raises(ValueError, match=r"optimizer 'o'.*sharded or local.*hk.DistributedOptimizer"):
        hk.checkpoint.save(shared_path / "step-2", {"o": plain})


def test_an_overflow_of_one_local_gradient_skips_the_step_on_all(rank, size):
    shared, own = keras.Variable([1.0]), keras.Variable([1.0])
    hk.register_local_variables(own)
    optimizer = hk.DistributedOptimizer(opts.LossScaleOptimizer(opts.SGD(1.0), initial_scale=4.0))
    for step in range(2):
        bad = step == 0 and rank == size - 1
        optimizer.apply([tf.fill([1], 1.0), tf.fill([1], np.inf if bad else 1.0)], [shared, own])
    assert float(optimizer.dynamic_scale) == 2.0
    np.testing.assert_allclose([shared.numpy(), own.numpy()], [[0.5], [1 - 0.5 / size]])


def test_a_built_optimizer_keeps_the_slots_of_local_variables(rank):
    shared, own = keras.Variable([1.0]), keras.Variable([1.0])
    hk.register_local_variables(own)
    plain = opts.SGD(1.0, momentum=0.5)
    plain.apply([tf.ones([1]), tf.fill([1], rank + 1.0)], [shared, own])
    optimizer = hk.DistributedOptimizer(plain)
    slots = [v for v in optimizer.variables if is_local(v)]
    np.testing.assert_allclose([v.numpy() for v in slots], [[-(rank + 1.0)]])


def test_a_variable_that_is_local_on_one_rank_only(rank, size):
    variable = tf.Variable(0.0)
    if rank == size - 1 > 0:
        hk.register_local_variables(variable)
    if size > 1:
        with pytest.raises(hk.CollectiveMismatchError, match=f"local.* on rank {size - 1}"):
            hk.average_gradients([tf.constant(1.0)], variables=[variable])
    assert hk.allgather_object(rank) == list(range(size))
