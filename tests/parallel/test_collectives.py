"""Compare every collective, dtype, size and kind of value with NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.pairwise import printed

import hvdkit as hk

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.core]

# 3 numbers are sent with the comparison of the ranks; 20,000 are sent by Horovod whatever their dtype.
SIZES = [3, 20_000]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"]
REDUCED = FLOATS + INTEGERS
MOVED = [*REDUCED, "uint64", "bool"]
MODES = ["numpy", "tensor", "graph"]
OPS = [hk.Sum, hk.Average, hk.Min, hk.Max]
# Relative errors of a sum of four numbers; numbers here are below 20, and may cancel.
ROUNDING = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-14}


def value(shape, dtype, rank):
    """Return numbers that every dtype holds exactly, different on each rank: 0 to 19, negative ones if signed."""
    numbers = (np.arange(np.prod(shape, dtype=int)).reshape(shape) * (rank + 2) + 3 * rank) % 20
    if dtype.startswith(("int", "float", "bfloat")):
        numbers = numbers - 7
    return numbers.astype(tf.as_dtype(dtype).as_numpy_dtype)


def reduced(values, op, dtype):
    """Return the reduction in float64; for integers the average is rounded toward zero."""
    stack = np.stack([v.astype(np.float64) for v in values])
    result = {hk.Sum: stack.sum(0), hk.Average: stack.mean(0), hk.Min: stack.min(0), hk.Max: stack.max(0)}[op]
    return result if dtype in FLOATS else np.trunc(np.round(result, 9))


def assert_same_bits(result):
    """Assert that every rank holds the same bits."""
    mine = np.asarray(result)
    for rank, other in enumerate(hk.allgather_object((mine.dtype.name, mine.shape, mine.tobytes()))):
        assert other == (mine.dtype.name, mine.shape, mine.tobytes()), f"rank {rank} has other bits"


def assert_near(result, expected, dtype):
    assert tf.as_dtype(result.dtype).name == dtype
    assert result.shape == expected.shape
    rounding = ROUNDING.get(dtype, 0)
    np.testing.assert_allclose(np.asarray(result).astype(np.float64), expected, rtol=rounding, atol=20 * rounding)


def as_kind(array, kind):
    return {"numpy": np.asarray, "tensor": tf.constant, "variable": tf.Variable}[kind](array)


def result_of(call, mode, *arrays):
    """Return the result of a call with NumPy arrays, with tensors, or in a graph that does not know its inputs."""
    if mode == "graph":
        return tf.function(call, autograph=False, reduce_retracing=True)(*map(tf.constant, arrays))
    result = call(*(as_kind(array, mode) for array in arrays))
    assert isinstance(tf.nest.flatten(result)[0], np.ndarray if mode == "numpy" else tf.Tensor)
    return result


def test_allreduce(rank, size, crossed):
    for dtype, n, mode in printed(crossed(dtype=REDUCED, n=SIZES, mode=MODES)):
        values = [value((n,), dtype, r) for r in range(size)]
        results = result_of(lambda x: [hk.allreduce(x, op) for op in OPS], mode, values[rank])
        for op, result in zip(OPS, results, strict=True):
            assert_near(result, reduced(values, op, dtype), dtype)
            assert_same_bits(result)


@pytest.mark.parametrize("n", SIZES)
def test_allreduce_of_bool_is_and_or(n, rank, size):
    values = [np.arange(n) % (r + 2) == 0 for r in range(size)]
    for op, expected in ((hk.Min, np.all(values, axis=0)), (hk.Max, np.any(values, axis=0))):
        for mode in printed(MODES):
            result = result_of(lambda x, op=op: hk.allreduce(x, op), mode, values[rank])
            assert np.asarray(result).dtype == bool
            np.testing.assert_array_equal(result, expected)
    for op in (hk.Sum, hk.Average):
        with pytest.raises(TypeError, match="bool"):
            hk.allreduce(values[rank], op)


def test_allreduce_of_random_floats_has_the_same_bits_everywhere(rank, size, crossed):
    for dtype, n in printed(crossed(dtype=FLOATS, n=SIZES)):
        mine = tf.constant(np.random.default_rng(rank).normal(size=n).astype(tf.as_dtype(dtype).as_numpy_dtype))
        for op in (hk.Sum, hk.Average):
            assert_same_bits(hk.allreduce(mine, op))
            assert_same_bits(result_of(lambda x, op=op: hk.allreduce(x, op), "graph", mine))


def test_plain_numbers_stay_plain_numbers(rank, size):
    for value_of in (lambda r: 3 * r - 4, lambda r: r / 4 - 1.5, np.float32, np.float64):
        mine = value_of(rank)
        numbers = [float(value_of(r)) for r in range(size)]
        for op, expected in ((hk.Sum, sum(numbers)), (hk.Min, min(numbers)), (hk.Max, max(numbers))):
            result = hk.allreduce(mine, op)
            assert type(result) is type(mine)
            assert result == expected
        average = hk.allreduce(mine)
        assert type(average) is type(mine)
        assert average == (int(sum(numbers) / size) if isinstance(mine, int) else sum(numbers) / size)
        assert type(hk.broadcast(mine, size - 1)) is type(mine)
    assert hk.allreduce(rank == 0, hk.Max) is True
    assert hk.allreduce(rank == 0, hk.Min) is (size == 1)
    result = hk.allreduce([1.0, float(rank)], hk.Sum)
    assert isinstance(result, np.ndarray) and result.tolist() == [size, sum(range(size))]


def test_arrays_without_axes_and_variables(rank, size):
    for kind in printed(["numpy", "tensor", "variable"]):
        x = as_kind(np.array(rank + 1.0, np.float32), kind)
        result = hk.allreduce(x, hk.Sum)
        assert isinstance(result, np.ndarray if kind == "numpy" else tf.Tensor)
        assert result.shape == () and result.dtype == np.float32
        assert float(result) == size * (size + 1) / 2
        gathered = hk.allgather(x)
        assert gathered.shape == (size,) and np.asarray(gathered).tolist() == [r + 1 for r in range(size)]


def test_results_are_the_caller_s_to_change(rank):
    for n in SIZES:
        for result in (hk.allreduce(np.ones(n)), hk.allgather(np.ones(n)), hk.broadcast(np.ones(n))):
            result += 1
            assert (result == 2).all()


def test_big_integers_are_exact(rank, size):
    big = 2**62 // size
    for n in (1, SIZES[1]):
        assert (hk.allreduce(np.full(n, big + rank), hk.Sum) == size * big + sum(range(size))).all()
        for sign in (1, -1):
            average = hk.allreduce(np.full(n, sign * (big + rank)))
            assert (average == sign * ((size * big + sum(range(size))) // size)).all(), "not rounded toward zero"


@pytest.mark.parametrize("mode", MODES)
def test_grouped_allreduce_of_mixed_dtypes(mode, rank, size):
    dtypes = ["float32", "int64", "bfloat16", "float32", "float16", "uint8", "float64", "int32"]
    shapes = [(2, 3), (), (4,), (0, 5), (70, 80), (3, 1), (), (9_000,)]
    values = [[value(s, d, r) for s, d in zip(shapes, dtypes, strict=True)] for r in range(size)]
    results = result_of(lambda *xs: hk.grouped_allreduce(xs, hk.Sum), mode, *values[rank])
    for i, (result, dtype) in enumerate(zip(results, dtypes, strict=True)):
        assert_near(result, reduced([v[i] for v in values], hk.Sum, dtype), dtype)
    assert hk.grouped_allreduce([]) == []


def rows_of(rank, size, n):
    """Return the number of rows: 0 on the first rank, and on the last of three or more."""
    return 0 if rank == 0 or rank == size - 1 > 1 else n * rank


def test_allgather_of_uneven_and_empty_rows(rank, size, crossed):
    for dtype, n, mode in printed(crossed(dtype=MOVED, n=[3, 5_000], mode=MODES)):
        values = [value((rows_of(r, size, n), 2), dtype, r) for r in range(size)]
        result = result_of(hk.allgather, mode, values[rank])
        assert_near(result, np.concatenate(values).astype(np.float64), dtype)


def test_broadcast_from_every_root(rank, size, crossed):
    for dtype, n, mode in printed(crossed(dtype=MOVED, n=SIZES, mode=MODES)):
        call = lambda x: [hk.broadcast(x, root) for root in range(size)]  # noqa: E731
        for root, result in enumerate(result_of(call, mode, value((n, 1), dtype, rank))):
            assert_near(result, value((n, 1), dtype, root).astype(np.float64), dtype)


def splits_of(rank, size, n):
    """Return rank r's splits: n * (r + peer) rows to each peer, none to itself."""
    return np.array([0 if peer == rank else n * (rank + peer) for peer in range(size)])


def test_alltoall_with_splits(rank, size, crossed):
    for dtype, n, mode in printed(crossed(dtype=MOVED, n=[1, 5_000], mode=MODES)):
        splits = [splits_of(r, size, n) for r in range(size)]
        values = [value((splits[r].sum(), 2), dtype, r) for r in range(size)]
        rows, counts = result_of(hk.alltoall, mode, values[rank], splits[rank])
        starts = [splits[r][:rank].sum() for r in range(size)]
        parts = [values[r][starts[r] : starts[r] + splits[r][rank]] for r in range(size)]
        assert_near(rows, np.concatenate(parts).astype(np.float64), dtype)
        assert np.asarray(counts).dtype == np.int32
        np.testing.assert_array_equal(counts, [s[rank] for s in splits])


def test_alltoall_in_equal_parts(rank, size, crossed):
    for n, mode in printed(crossed(n=SIZES, mode=MODES)):
        mine = np.arange(n * size, dtype=np.int64) + 1000 * rank
        expected = np.concatenate([np.arange(n * rank, n * (rank + 1)) + 1000 * r for r in range(size)])
        np.testing.assert_array_equal(result_of(lambda x: hk.alltoall(x), mode, mine), expected)


def test_reducescatter(rank, size, crossed):
    cases = crossed(dtype=REDUCED, rows=[5, 10_001], mode=["tensor", "graph"])
    cases += crossed(dtype=["float32"], rows=[1, 12], mode=["tensor", "graph"])
    for dtype, rows, mode in printed(cases):
        values = [value((rows, 2), dtype, r) for r in range(size)]
        rows_each, more = divmod(rows, size)
        start = rank * rows_each + min(rank, more)
        call = lambda x: [hk.reducescatter(x, op) for op in (hk.Sum, hk.Average)]  # noqa: E731
        for op, result in zip((hk.Sum, hk.Average), result_of(call, mode, values[rank]), strict=True):
            expected = reduced(values, op, dtype)[start : start + rows_each + (rank < more)]
            assert_near(result, expected, dtype)


def test_nothing_on_any_rank():
    for call in printed((hk.allreduce, hk.allgather, hk.broadcast, hk.reducescatter, hk.alltoall)):
        for mode in MODES:
            result = result_of(call, mode, np.zeros((0, 3), np.float32))
            assert result.shape == (0, 3) and result.dtype == np.float32


def test_objects(rank, size):
    assert hk.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    for root in range(size):
        assert hk.broadcast_object(f"rank {rank}" if rank == root else None, root) == f"rank {root}"
    big = np.random.default_rng(rank).bytes(300_000 * rank)
    assert [len(b) for b in hk.allgather_object(big)] == [300_000 * r for r in range(size)]
    hk.barrier()
