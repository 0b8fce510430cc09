"""Compare every collective, dtype, size and kind of value with NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.pairwise import pairwise

import hvdkit as hk

pytestmark = pytest.mark.contract

# 3 numbers are sent with the comparison of the ranks; 20,000 are sent by Horovod whatever their dtype.
SIZES = [3, 20_000]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"]
REDUCED = FLOATS + INTEGERS
MOVED = [*REDUCED, "uint64", "bool"]
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
    return {"numpy": lambda: array, "tensor": lambda: tf.constant(array), "variable": lambda: tf.Variable(array)}[
        kind
    ]()


def in_graph(function):
    """Return ``function`` as a graph with inputs that are unknown when it is traced."""
    return tf.function(function, autograph=False, reduce_retracing=True)


@pairwise(dtype=REDUCED, n=SIZES, mode=["numpy", "tensor", "graph"])
def test_allreduce(dtype, n, mode, rank, size):
    values = [value((n,), dtype, r) for r in range(size)]
    for op in OPS:
        call = lambda x, op=op: hk.allreduce(x, op)  # noqa: E731
        if mode == "graph":
            result = in_graph(call)(tf.constant(values[rank]))
        else:
            result = call(as_kind(values[rank], mode))
        assert isinstance(result, np.ndarray if mode == "numpy" else tf.Tensor)
        assert_near(result, reduced(values, op, dtype), dtype)
        assert_same_bits(result)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("n", SIZES)
def test_allreduce_of_bool_is_and_or(n, mode, rank, size):
    values = [np.arange(n) % (r + 2) == 0 for r in range(size)]
    for op, expected in ((hk.Min, np.all(values, axis=0)), (hk.Max, np.any(values, axis=0))):
        call = lambda x, op=op: hk.allreduce(x, op)  # noqa: E731
        result = in_graph(call)(tf.constant(values[rank])) if mode == "graph" else call(values[rank])
        assert np.asarray(result).dtype == bool
        np.testing.assert_array_equal(result, expected)
    for op in (hk.Sum, hk.Average):
        with pytest.raises(TypeError, match="bool"):
            hk.allreduce(values[rank], op)


@pytest.mark.parametrize("n", SIZES)
def test_allreduce_of_random_floats_has_the_same_bits_everywhere(n, rank, size):
    for dtype in FLOATS:
        mine = tf.constant(np.random.default_rng(rank).normal(size=n).astype(tf.as_dtype(dtype).as_numpy_dtype))
        for op in (hk.Sum, hk.Average):
            assert_same_bits(hk.allreduce(mine, op))
            assert_same_bits(in_graph(lambda x, op=op: hk.allreduce(x, op))(mine))


@pytest.mark.parametrize("value_of", [lambda r: 3 * r - 4, lambda r: r / 4 - 1.5, lambda r: np.float32(r), np.float64])
def test_plain_numbers_stay_plain_numbers(value_of, rank, size):
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


def test_python_bool_and_lists(rank, size):
    assert hk.allreduce(rank == 0, hk.Max) is True
    assert hk.allreduce(rank == 0, hk.Min) is (size == 1)
    result = hk.allreduce([1.0, float(rank)], hk.Sum)
    assert isinstance(result, np.ndarray) and result.tolist() == [size, sum(range(size))]


@pytest.mark.parametrize("kind", ["numpy", "tensor", "variable"])
def test_arrays_without_axes_and_variables(kind, rank, size):
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


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_grouped_allreduce_of_mixed_dtypes(mode, rank, size):
    dtypes = ["float32", "int64", "bfloat16", "float32", "float16", "uint8", "float64", "int32"]
    shapes = [(2, 3), (), (4,), (0, 5), (70, 80), (3, 1), (), (9_000,)]
    values = [[value(s, d, r) for s, d in zip(shapes, dtypes, strict=True)] for r in range(size)]
    call = lambda *xs: hk.grouped_allreduce(xs, hk.Sum)  # noqa: E731
    mine = [tf.constant(v) for v in values[rank]]
    results = in_graph(call)(*mine) if mode == "graph" else call(*mine)
    for i, (result, dtype) in enumerate(zip(results, dtypes, strict=True)):
        assert_near(result, reduced([v[i] for v in values], hk.Sum, dtype), dtype)
    assert hk.grouped_allreduce([]) == []


def rows_of(rank, size, n):
    """Return the number of rows: 0 on the first rank, and on the last of three or more."""
    return 0 if rank == 0 or rank == size - 1 > 1 else n * rank


@pairwise(dtype=MOVED, n=SIZES, mode=["numpy", "tensor", "graph"])
def test_allgather_of_uneven_and_empty_rows(dtype, n, mode, rank, size):
    n = n if n == SIZES[0] else n // 4
    values = [value((rows_of(r, size, n), 2), dtype, r) for r in range(size)]
    if mode == "graph":
        result = in_graph(hk.allgather)(tf.constant(values[rank]))
    else:
        result = hk.allgather(as_kind(values[rank], mode))
    assert isinstance(result, np.ndarray if mode == "numpy" else tf.Tensor)
    assert_near(result, np.concatenate(values).astype(np.float64), dtype)


@pairwise(dtype=MOVED, n=SIZES, mode=["numpy", "tensor", "graph"])
def test_broadcast_from_every_root(dtype, n, mode, rank, size):
    for root in range(size):
        call = lambda x, root=root: hk.broadcast(x, root)  # noqa: E731
        mine = value((n, 1), dtype, rank)
        result = in_graph(call)(tf.constant(mine)) if mode == "graph" else call(as_kind(mine, mode))
        assert_near(result, value((n, 1), dtype, root).astype(np.float64), dtype)


def splits_of(rank, size, n):
    """Return rank r's splits: n * (r + peer) rows to each peer, none to itself."""
    return np.array([0 if peer == rank else n * (rank + peer) for peer in range(size)])


@pairwise(dtype=MOVED, n=[1, 5_000], mode=["numpy", "tensor", "graph"])
def test_alltoall_with_splits(dtype, n, mode, rank, size):
    splits = [splits_of(r, size, n) for r in range(size)]
    values = [value((splits[r].sum(), 2), dtype, r) for r in range(size)]
    if mode == "graph":
        rows, counts = in_graph(hk.alltoall)(tf.constant(values[rank]), tf.constant(splits[rank]))
    else:
        rows, counts = hk.alltoall(as_kind(values[rank], mode), splits[rank])
        assert isinstance(rows, np.ndarray if mode == "numpy" else tf.Tensor)
    starts = [splits[r][:rank].sum() for r in range(size)]
    parts = [values[r][starts[r] : starts[r] + splits[r][rank]] for r in range(size)]
    assert_near(rows, np.concatenate(parts).astype(np.float64), dtype)
    assert np.asarray(counts).dtype == np.int32
    np.testing.assert_array_equal(counts, [s[rank] for s in splits])


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("n", SIZES)
def test_alltoall_in_equal_parts(n, mode, rank, size):
    mine = np.arange(n * size, dtype=np.int64) + 1000 * rank
    result = in_graph(lambda x: hk.alltoall(x))(tf.constant(mine)) if mode == "graph" else hk.alltoall(mine)
    expected = np.concatenate([np.arange(n * rank, n * (rank + 1)) + 1000 * r for r in range(size)])
    np.testing.assert_array_equal(result, expected)


@pairwise(dtype=REDUCED, rows=[1, 5, 12, 10_001], mode=["eager", "graph"])
def test_reducescatter(dtype, rows, mode, rank, size):
    values = [value((rows, 2), dtype, r) for r in range(size)]
    each, more = divmod(rows, size)
    start = rank * each + min(rank, more)
    for op in (hk.Sum, hk.Average):
        call = lambda x, op=op: hk.reducescatter(x, op)  # noqa: E731
        mine = tf.constant(values[rank])
        result = in_graph(call)(mine) if mode == "graph" else call(mine)
        expected = reduced(values, op, dtype)[start : start + each + (rank < more)]
        assert_near(result, expected, dtype)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_nothing_on_any_rank(mode, rank, size):
    empty = np.zeros((0, 3), np.float32)
    for call in (hk.allreduce, hk.allgather, hk.broadcast, hk.reducescatter, hk.alltoall):
        result = in_graph(call)(tf.constant(empty)) if mode == "graph" else call(empty)
        assert result.shape == (0, 3) and result.dtype == np.float32


def test_objects(rank, size):
    assert hk.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    for root in range(size):
        assert hk.broadcast_object(f"rank {rank}" if rank == root else None, root) == f"rank {root}"
    big = np.random.default_rng(rank).bytes(300_000 * rank)
    assert [len(b) for b in hk.allgather_object(big)] == [300_000 * r for r in range(size)]
    hk.barrier()
