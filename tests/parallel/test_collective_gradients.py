"""The gradient of every collective equals that of the global function: finite differences of a NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers.pairwise import printed

import hvdkit as hk

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.core]

# 4 numbers are sent with the comparison of calls; 4,200 are more than 16 KiB in every dtype.
SIZES = [4, 4_200]
OPS = {"sum": hk.Sum, "average": hk.Average, "min": hk.Min, "max": hk.Max, "product": hk.Product}
FLOATS = ["float16", "bfloat16", "float32", "float64"]
TOLERANCE = {"float16": 2e-2, "bfloat16": 6e-2, "float32": 1e-4, "float64": 1e-6}
STEP = 1e-5


def reduction(name):
    return {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max, "product": np.prod}[name]


def scattered(whole, size):
    """Split ``whole`` among the ranks; the first ``len(whole) % size`` ranks get one more row."""
    return np.array_split(whole, size)


def splits_of(rank, size, rows):
    """Return unequal splits of ``rows`` rows; the first rank's part is empty on odd ranks."""
    splits = np.full(size, rows // size)
    splits[-1] += rows - splits.sum()
    if rank % 2 and size > 1:
        splits[-1] += splits[0]
        splits[0] = 0
    return splits


def exchanged(xs, size):
    parts = [np.split(x, np.cumsum(splits_of(r, size, len(x)))[:-1]) for r, x in enumerate(xs)]
    return [np.concatenate([parts[s][r] for s in range(size)]) for r in range(size)]


def cases(size, root):
    """Return for each collective: a rank's call, the NumPy reference from all inputs to all outputs, rows of rank r."""
    found = {
        f"allreduce {name}": (
            lambda x, op=op: hk.allreduce(x, op),
            lambda xs, name=name: [reduction(name)(np.stack(xs), axis=0)] * size,
            lambda n, r: n,
        )
        for name, op in OPS.items()
    }
    found["allreduce with factors"] = (
        lambda x: hk.allreduce(x, hk.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda xs: [1.5 * np.sum(xs, axis=0)] * size,
        lambda n, r: n,
    )
    found["allreduce max with factors"] = (
        lambda x: hk.allreduce(x, hk.Max, prescale_factor=-0.5, postscale_factor=3.0),
        lambda xs: [3.0 * np.max(-0.5 * np.stack(xs), axis=0)] * size,
        lambda n, r: n,
    )
    found["allgather"] = (hk.allgather, lambda xs: [np.concatenate(xs)] * size, lambda n, r: n + r)
    found["broadcast"] = (lambda x: hk.broadcast(x, root), lambda xs: [xs[root]] * size, lambda n, r: n)
    found["alltoall"] = (
        lambda x: hk.alltoall(x, splits_of(hk.rank(), size, int(x.shape[0])))[0],
        lambda xs: exchanged(xs, size),
        lambda n, r: n + r,
    )
    for name, op in (("sum", hk.Sum), ("average", hk.Average)):
        found[f"reducescatter {name}"] = (
            lambda x, op=op: hk.reducescatter(x, op),
            lambda xs, name=name: scattered(reduction(name)(np.stack(xs), axis=0), size),
            lambda n, r: n + 1,
        )
    found["reducescatter with factors"] = (
        lambda x: hk.reducescatter(x, hk.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda xs: scattered(1.5 * np.sum(xs, axis=0), size),
        lambda n, r: n + 1,
    )
    return found


def inputs(size, rows, n):
    """Return values between 0.5 and 1.5 that differ on all ranks; each rank has some elements' minimum and maximum."""
    rng = np.random.default_rng(n)
    return [0.5 + rng.random((rows(n, r), 2)) for r in range(size)]


def weights_of(rank, shape, dtype):
    rng = np.random.default_rng(100 + rank)
    return tf.constant(rng.normal(size=shape), dtype)


def gradient_of(call, x, weights, mode):
    """Return the gradient of sum(weights * call(x)) with respect to this rank's x, in eager mode or in a graph."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(call(x) * weights)
        return tape.gradient(loss, x)

    return (tf.function(step, autograph=False) if mode == "graph" else step)(x)


def differences(reference, xs, rank, places):
    """Return central differences of the sum of all ranks' losses with respect to some elements of this rank's x."""

    def loss(xs):
        return sum(float(np.sum(y * weights_of(r, y.shape, tf.float64).numpy())) for r, y in enumerate(reference(xs)))

    found = []
    for place in places:
        values = []
        for sign in (1, -1):
            moved = [x.copy() for x in xs]
            moved[rank][place] += sign * STEP
            values.append(loss(moved))
        found.append((values[0] - values[1]) / (2 * STEP))
    return np.array(found)


def test_gradients(rank, size, crossed):
    every = cases(size, size - 1)
    for case, n, dtype, mode in printed(crossed(case=[*every], n=SIZES, dtype=FLOATS, mode=["eager", "graph"])):
        call, reference, rows = every[case]
        xs = [x.astype(tf.as_dtype(dtype).as_numpy_dtype).astype(np.float64) for x in inputs(size, rows, n)]
        weights = weights_of(rank, reference(xs)[rank].shape, dtype)
        found = gradient_of(call, tf.constant(xs[rank], dtype), weights, mode)
        assert found is not None and found.dtype == dtype and found.shape == xs[rank].shape
        places = [(int(row), column) for row in np.linspace(0, len(xs[rank]) - 1, 3) for column in (0, 1)]
        expected = differences(reference, xs, rank, places)
        mine = tf.cast(found, tf.float64).numpy()[tuple(np.transpose(places))]
        np.testing.assert_allclose(mine, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * size * 4)


def test_the_size_of_a_message_makes_no_difference(size):
    """The largest array that is sent with the comparison of calls, and the smallest that is not."""
    for n in printed([4_096, 4_097]):
        x = tf.Variable(tf.ones([n]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hk.allreduce(x))
        np.testing.assert_allclose(tape.gradient(loss, x), np.ones(n), rtol=1e-6)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x - hk.allreduce(tf.reduce_mean(x))) ** 2)
        np.testing.assert_allclose(tape.gradient(loss, x), np.zeros(n), atol=1e-5)


def test_ties_share_the_gradient_of_an_extreme(size):
    x = tf.ones([3])
    for op in (hk.Min, hk.Max):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hk.allreduce(x, op))
        np.testing.assert_allclose(tape.gradient(loss, x), np.ones(3), rtol=1e-6)


def test_a_product_with_zeros(rank, size):
    for zeros in printed([0, 1, 2]):
        values = [0.0 if r < zeros else r + 2.0 for r in range(size)]
        x = tf.constant(values[rank])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hk.allreduce(x, hk.Product)
        others = np.prod([v for r, v in enumerate(values) if r != rank])
        assert float(y) == np.prod(values)
        np.testing.assert_allclose(tape.gradient(y, x), size * others, rtol=1e-6)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_second_derivatives(mode, rank, size):
    """L = sum_r y_r^3 with y_r = sum_s x_s: the first derivative is 3 N y^2, the gradient of their sum 6 N^2 y."""

    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = hk.allreduce(x, hk.Sum) ** 3
            first = inner.gradient(loss, x)
        return first, outer.gradient(first, x)

    y = sum(1.0 + r for r in range(size))
    first, found = (tf.function(second, autograph=False) if mode == "graph" else second)(
        tf.constant(1.0 + rank, tf.float64)
    )
    np.testing.assert_allclose([first, found], [3 * size * y**2, 6 * size**2 * y], rtol=1e-12)


def test_grouped_values_of_which_some_have_no_gradient(rank, size):
    x, number = tf.Variable([1.0 + rank]), tf.constant([rank])
    with tf.GradientTape() as tape:
        total, count, wide = hk.grouped_allreduce([x, number, tf.cast(x, tf.float64)], hk.Sum)
        loss = tf.reduce_sum(total) + 2 * tf.cast(tf.reduce_sum(wide), tf.float32)
    assert int(count[0]) == sum(range(size))
    np.testing.assert_allclose(tape.gradient(loss, x), [3.0 * size])
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(y) for y in hk.grouped_allgather([x, 2 * x]))
    np.testing.assert_allclose(tape.gradient(loss, x), [3.0 * size])


def test_numbers_and_arrays_need_no_tape(size):
    with tf.GradientTape():
        assert hk.allreduce(1, hk.Sum) == size
        assert isinstance(hk.allreduce(np.ones(3), hk.Sum), np.ndarray)


@pytest.mark.ranks(1, 2, 4)
def test_adasum_has_no_gradient(size):
    if size & (size - 1) or (size > 1 and not hk.cluster.exchange().over_mpi):
        pytest.skip("tests/parallel/test_collective_rules.py: Adasum is refused")
    x = tf.ones([3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = hk.allreduce(x, hk.Adasum)
    with pytest.raises(LookupError, match="no gradient"):
        tape.gradient(y, x)
