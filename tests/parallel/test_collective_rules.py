"""Rules for messages of every size, other threads, asynchronous calls, uneven loops, and unusual values."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf
from helpers.pairwise import printed

import hvdkit as hk
from hvdkit import cluster
from hvdkit.collectives import calls, tensors

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.core(1, 2, 3)]

OVER_MPI = cluster.exchange().over_mpi
SIZES = [3, 20_000]


def each_way(x, call):
    """Return the results of ``call(x)`` in eager mode and in a graph."""
    return [call(tf.constant(x)), tf.function(call, autograph=False)(tf.constant(x))]


def test_nan_propagates_through_min_and_max(rank, size, crossed):
    for dtype, n in printed(crossed(dtype=["float16", "bfloat16", "float32", "float64"], n=SIZES)):
        x = np.full(n, rank + 1.0)
        x[0] = np.nan if rank == size - 1 else 1.0
        x[1] = np.nan if rank == 0 else -np.inf
        x[2] = np.inf
        x = x.astype(tf.as_dtype(dtype).as_numpy_dtype)
        for op, rest in ((hk.Min, 1), (hk.Max, size)):
            for y in each_way(x, lambda x, op=op: hk.allreduce(x, op)):
                y = tf.cast(y, tf.float64).numpy()
                assert np.isnan(y[:2]).all() and y[2] == np.inf and (y[3:] == rest).all()


def test_zeros_of_both_signs_are_ordered(rank, size):
    for n in printed(SIZES):
        x = np.full(n, -0.0 if rank else 0.0, np.float32)
        for y in each_way(x, lambda x: hk.allreduce(x, hk.Min)):
            assert np.signbit(y).all() == (size > 1)
        for y in each_way(x, lambda x: hk.allreduce(x, hk.Max)):
            assert not np.signbit(y).any()


def test_integers_wrap_around_and_their_average_does_not(rank, size, crossed):
    for dtype, n in printed(crossed(dtype=["int8", "uint8", "int16", "int32", "uint32", "int64"], n=SIZES)):
        highest = np.iinfo(dtype).max
        values = [np.full(n, highest - r, dtype) for r in range(size)]
        total = sum(int(v[0]) for v in values)
        bits = np.iinfo(dtype).bits
        wrapped = np.array(total % 2**bits, np.uint64).astype(dtype)
        for y in each_way(values[rank], lambda x: hk.allreduce(x, hk.Sum)):
            assert (y.numpy() == wrapped).all()
        if dtype != "int64":
            for y in each_way(values[rank], lambda x: hk.allreduce(x)):
                assert (y.numpy() == total // size).all()


def test_floats_near_their_limit(size, crossed):
    """The sum is infinite for every message size, and the average finite."""
    for dtype, n in printed(crossed(dtype=["float16", "float32"], n=SIZES)):
        x = np.full(n, 0.75 * np.finfo(dtype).max, dtype)
        for y in each_way(x, lambda x: hk.allreduce(x, hk.Sum)):
            assert np.isinf(y).all() == (size > 1)
        for y in each_way(x, hk.allreduce):
            np.testing.assert_allclose(y, x, rtol=2e-3)


def test_products_and_factors(rank, size):
    for n in printed(SIZES):
        x = np.full(n, rank + 2, np.int32)
        for y in each_way(x, lambda x: hk.allreduce(x, hk.Product)):
            assert (y.numpy() == np.prod(np.arange(size) + 2)).all()
        for dtype, expected in (("float32", 1.5 * size), ("int32", 1 * size)):
            ones = np.ones(n, dtype) * (3 if dtype == "int32" else 1)
            factors = {"prescale_factor": 0.5, "postscale_factor": 3.0 if dtype == "float32" else 1.0}
            for y in each_way(ones, lambda x, f=factors: hk.allreduce(x, hk.Sum, **f)):
                assert (y.numpy() == expected).all()


@pytest.mark.core  # on 4 ranks, too: it needs a power of two
@pytest.mark.parametrize("n", SIZES)
def test_adasum(n, rank, size):
    """For vectors equal on all ranks Adasum is their average, for orthogonal ones their sum."""
    if size & (size - 1) or (size > 1 and not OVER_MPI):
        with pytest.raises(ValueError, match="Adasum"):
            hk.allreduce(np.ones(n), hk.Adasum)
        return
    for y in each_way(np.arange(n, dtype=np.float32), lambda x: hk.allreduce(x, hk.Adasum)):
        np.testing.assert_allclose(y, np.arange(n), rtol=1e-5)
    own = np.zeros(n * size, np.float32)
    own[rank * n : (rank + 1) * n] = rank + 1
    for y in each_way(own, lambda x: hk.allreduce(x, hk.Adasum)):
        np.testing.assert_allclose(y, np.repeat(np.arange(size) + 1, n), rtol=1e-5)


def test_elements_beyond_a_message_of_mpi_travel_in_pieces(monkeypatch, rank, size):
    monkeypatch.setattr(tensors, "LARGEST", 5_000)
    x = np.arange(20_001, dtype=np.float64) + rank
    expected = size * np.arange(20_001) + sum(range(size))
    for y in each_way(x, lambda x: hk.allreduce(x, hk.Sum)):
        np.testing.assert_array_equal(y, expected)
    for y in each_way(x, lambda x: hk.broadcast(x, size - 1)):
        np.testing.assert_array_equal(y, np.arange(20_001) + size - 1)
    variable = tf.Variable(x)
    hk.broadcast_variables([variable], size - 1)
    np.testing.assert_array_equal(variable, np.arange(20_001) + size - 1)


@pytest.mark.ranks(2, 3)
def test_too_many_elements_to_gather_are_refused_before_anything_is_sent(monkeypatch, size):
    monkeypatch.setattr(tensors, "LARGEST", 15_000)
    with pytest.raises(ValueError, match="15,000"):
        hk.allgather(np.ones(10_000))
    with pytest.raises(ValueError, match="15,000"):
        hk.reducescatter(np.ones(15_001))
    with pytest.raises(ValueError, match="15,000"):  # only rank 0 would receive too much
        hk.alltoall(np.ones(10_000), [10_000] + [0] * (size - 1))
    rows, _ = hk.alltoall(np.ones(size * 2_000), [2_000] * size)
    assert len(rows) == size * 2_000
    assert calls.tensors is tensors


def test_narrow_dtypes_are_moved_exactly(rank, size, crossed):
    for dtype, n in printed(crossed(dtype=["float8_e4m3fn", "float8_e5m2", "int4", "uint4"], n=SIZES)):
        numbers = (np.arange(n) + rank) % 7
        x = tf.constant(numbers.astype(tf.as_dtype(dtype).as_numpy_dtype))
        for call, expected in (
            (hk.allgather, np.concatenate([(np.arange(n) + r) % 7 for r in range(size)])),
            (lambda x: hk.broadcast(x, size - 1), (np.arange(n) + size - 1) % 7),
        ):
            for y in (call(x), tf.function(call, autograph=False)(x)):
                assert y.dtype == dtype
                np.testing.assert_array_equal(y.numpy().astype(np.float32), expected)


def test_a_tensor_of_unknown_rank(rank, size):
    step = tf.function(
        lambda x: (hk.allgather(x), hk.allreduce(x, hk.Sum)), input_signature=[tf.TensorSpec(None)], autograph=False
    )
    for shape in printed([(), (3,), (2, 2)]):
        gathered, total = step(tf.fill(shape, float(rank)))
        np.testing.assert_array_equal(gathered, np.concatenate([np.full(shape or (1,), r) for r in range(size)]))
        np.testing.assert_array_equal(total, np.full(shape, sum(range(size))))


def test_fractional_splits_are_refused_in_graphs(size):
    step = tf.function(lambda x, splits: hk.alltoall(x, splits), autograph=False)
    with pytest.raises(TypeError, match="splits: got dtype float32"):
        step(tf.ones([4]), tf.constant([4.0] + [0.0] * (size - 1)))


@pytest.mark.ranks(2, 3)
def test_a_second_thread_is_refused(size):
    """On each rank its calls could run in a different order relative to those of the first thread."""
    raised = []

    def call():
        try:
            hk.allreduce(1)
        except hk.HvdkitError as error:
            raised.append(str(error))

    hk.barrier()
    thread = threading.Thread(target=call, name="loader")
    thread.start()
    thread.join()
    assert "thread 'loader', while thread 'MainThread' runs" in raised[0]
    assert hk.allreduce(1, hk.Sum) == size


def test_a_python_function_in_a_graph_may_call(size):
    @tf.function
    def step(x):
        return tf.py_function(lambda value: hk.allreduce(value, hk.Sum), [x], tf.float32)

    assert float(step(tf.constant(1.0))) == size


def test_asynchronous_collectives(rank, size):
    """They run in the order of the calls, also relative to synchronous ones."""
    x = np.full(20_000, rank + 1.0)
    small, large = hk.allreduce_async(rank, hk.Sum), hk.allreduce_async(x, hk.Sum)
    x[:] = -1  # too late to change the result
    assert hk.allgather_object(rank) == list(range(size))
    assert size == 1 or (small.done() and large.done())
    others = [
        hk.allgather_async(np.array([rank])),
        hk.broadcast_async(np.array([rank]), size - 1),
        hk.alltoall_async(np.full(size, rank)),
        hk.reducescatter_async(np.ones(size), hk.Sum),
        hk.grouped_allreduce_async([1, 2.0], hk.Sum),
    ]
    assert hk.wait(small) == sum(range(size)) and (hk.wait(large) == sum(range(size)) + size).all()
    gathered, received, rows, part, (one, two) = map(hk.wait, others)
    assert gathered.tolist() == list(range(size)) and received == size - 1
    assert rows.tolist() == list(range(size)) and part.tolist() == [size] and (one, two) == (size, 2.0 * size)
    assert float(tf.function(lambda: hk.wait(hk.allreduce_async(tf.constant(1.0), hk.Sum)))()) == size
    with pytest.raises(TypeError, match="handle"):
        hk.wait(1)


@pytest.mark.ranks(2, 3)
def test_an_asynchronous_mistake_is_raised_to_who_waits(rank, size):
    handle = hk.allreduce_async(1.0 if rank < size - 1 else "text")
    with pytest.raises(TypeError if rank == size - 1 else hk.CollectiveMismatchError, match="str"):
        hk.wait(handle)


def test_ranks_that_have_joined_count_as_zeros(rank, size):
    """Rank r has r + 1 batches."""
    if size > 1 and not OVER_MPI:
        with pytest.raises(hk.HvdkitError, match="join: got a job under Gloo"):
            hk.join()
        return
    step = tf.function(lambda x: hk.allreduce(x, hk.Sum))
    for number in range(rank + 1):
        left = range(number, size)  # the ranks that still have a batch
        assert hk.allreduce(rank + 1, hk.Sum) == sum(r + 1 for r in left)
        np.testing.assert_allclose(hk.allreduce(np.full(20_000, 2.0)), 2.0 * len(left) / size)
        assert float(step(tf.constant(1.0))) == len(left)
    assert hk.join() == size - 1
    assert hk.allreduce(1, hk.Sum) == size


@pytest.mark.ranks(2, 3)
def test_what_a_joined_rank_cannot_take_part_in(rank):
    if not OVER_MPI:
        return
    if rank:
        with pytest.raises(hk.CollectiveMismatchError, match="join: rank 0 has joined, but rank 1 called allgather"):
            hk.allgather(np.ones(3))
        hk.barrier()
    hk.join()
    hk.barrier()


def test_rank_and_size_when_a_graph_runs(rank, size):
    found = tf.function(lambda: [hk.rank_op(), hk.size_op(), hk.local_rank_op(), hk.local_size_op()])()
    assert [int(x) for x in found] == [rank, size, hk.local_rank(), hk.local_size()]
    assert all(x.dtype == tf.int32 for x in found)


def test_sets_of_hosts(rank, size):
    if not OVER_MPI:
        return
    host, across = hk.local_set(), hk.cross_set()  # all ranks are on one host
    assert host.ranks == tuple(range(size)) and across.ranks == (rank,)
    total = hk.allreduce(rank, hk.Sum, process_set=host)
    assert hk.allreduce(total, hk.Sum, process_set=across) == sum(range(size))


def test_names_are_compared(rank, size):
    assert hk.allreduce(1, hk.Sum, name="loss") == size
    assert float(tf.function(lambda: hk.allreduce(tf.constant(1.0), hk.Sum, name="loss"))()) == size
    if size > 1:
        with pytest.raises(hk.CollectiveMismatchError, match="accuracy"):
            hk.allreduce(1, name="loss" if rank else "accuracy")


@pytest.mark.ranks(2, 3)
@pytest.mark.core(2)
@pytest.mark.parametrize("traced", [False, True])
def test_rows_of_any_dtype_are_reduced_alone_and_with_dense_tensors(rank, size, traced):
    """Horovod takes lists that are partly sparse, and integers. Rank r has row 0 and, twice, row r."""

    def reduce(*parts, op):
        xs = [tf.IndexedSlices(parts[0], parts[1], tf.constant([size + 1, 2])), parts[2]]
        return hk.grouped_allreduce([*xs, xs[0]], op), hk.allreduce(xs[0], op, postscale_factor=2.0)

    for dtype in ("int32", "int64", "uint8", "float16", "float32", "float64"):
        rows = tf.constant([0, rank, rank], tf.int64)
        values, dense = tf.constant([[5, 7], [1, 2], [1, 2]], dtype), tf.constant([rank], dtype)
        total = np.zeros([size + 1, 2])
        for r in range(size):
            np.add.at(total, [0, r, r], [[5, 7], [1, 2], [1, 2]])
        for op, divisor in ((hk.Sum, 1), (hk.Average, size)):
            run = tf.function(reduce) if traced else reduce
            (first, middle, last), doubled = run(values, rows, dense, op=op)
            expected = total // divisor if values.dtype.is_integer else total / divisor
            for each, factor in ((first, 1), (last, 1), (doubled, 2)):
                assert each.values.dtype == dtype and len(set(each.indices.numpy())) == len(each.indices)
                whole = np.zeros_like(expected)
                whole[each.indices.numpy()] = each.values.numpy()
                np.testing.assert_allclose(whole, expected * factor, rtol=1e-3)
            whole = sum(range(size)) // divisor if values.dtype.is_integer else sum(range(size)) / divisor
            np.testing.assert_allclose(middle, [whole], rtol=1e-3)


def test_rows_are_reduced_by_sums_and_averages_only(rank):
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([9, 2]))
    with pytest.raises(ValueError, match="op: got Max"):
        hk.allreduce(rows, hk.Max)


@pytest.mark.ranks(2, 3)
def test_arguments_for_rows_that_are_other_or_wrong_on_one_rank_are_an_error_on_all(rank, size):
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([9, 2]))
    is_odd = rank == size - 1
    for call, message in (
        (lambda: hk.allreduce(rows, hk.Average if is_odd else hk.Sum), r"op=(Average|Sum)\) of IndexedSlices"),
        (lambda: hk.allreduce(rows, hk.Max if is_odd else hk.Sum), "op: got Max"),
        (lambda: hk.allreduce(rows, prescale_factor=2.0 if is_odd else 1.0), r"factors=\(2.0, 1.0\)"),
        (lambda: hk.allreduce(rows, postscale_factor=np.nan if is_odd else 1.0), "postscale_factor: got nan"),
        (lambda: hk.allreduce(rows, prescale_factor=np.ones(2) if is_odd else 1.0), "prescale_factor: got"),
        (lambda: hk.allreduce(tf.ones(2), prescale_factor=np.ones(2) if is_odd else 1.0), "prescale_factor: got"),
        (lambda: hk.allreduce(rows if is_odd else rows.values), "of IndexedSlices"),
    ):
        with pytest.raises((ValueError, hk.CollectiveMismatchError), match=message):
            call()
    with pytest.raises(tf.errors.OpError):
        tf.function(lambda: hk.allreduce(rows, hk.Average if is_odd else hk.Sum))()
    with pytest.raises(ValueError, match="prescale_factor: got"):
        tf.function(lambda factor: hk.allreduce(rows, prescale_factor=factor))(tf.constant(2.0))
    assert hk.allreduce(1, hk.Sum) == size
