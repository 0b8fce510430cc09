"""Mistakes on one rank are errors on every rank, and the cluster remains usable."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import assert_mismatch
from helpers.pairwise import printed

import hvdkit as hk

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.core(2)]

LARGE = 20_000


def assert_usable(rank, size):
    assert hk.allreduce(np.arange(3) + rank, hk.Sum).tolist() == [size * i + sum(range(size)) for i in range(3)]
    assert (hk.allreduce(tf.ones([LARGE]), hk.Sum) == size).numpy().all()
    assert hk.allgather_object(rank) == list(range(size))


def unlike(odd, size):
    """Return for each mistake: a call that differs on the ``odd`` rank, and text that the message must contain."""
    x = np.ones((LARGE, 2), np.float32)
    return {
        "shape": (lambda: hk.allreduce(x[:-1] if odd else x), ["float32[19999, 2]", "float32[20000, 2]"]),
        "small shape": (lambda: hk.allreduce(x[:3] if odd else x[:4]), ["float32[3, 2]", "float32[4, 2]"]),
        "axes": (lambda: hk.allreduce(x[0] if odd else x[:1]), ["float32[2]", "float32[1, 2]"]),
        "dtype": (lambda: hk.allreduce(x.astype("float64") if odd else x), ["float64", "float32"]),
        "op": (lambda: hk.allreduce(x, hk.Max if odd else hk.Sum), ["op=Max", "op=Sum"]),
        "collective": (lambda: hk.allgather(x) if odd else hk.allreduce(x), ["allgather", "allreduce"]),
        "object and tensor": (
            lambda: hk.allgather_object(1) if odd else hk.broadcast(x),
            ["allgather_object", "root=0"],
        ),
        "barrier": (lambda: hk.barrier() if odd else hk.allreduce(1), ["barrier", "allreduce"]),
        "number of tensors": (lambda: hk.grouped_allreduce([x] * (1 + odd)), ["allreduce"]),
        "root": (lambda: hk.broadcast(x, 1 if odd else 0), ["root=1", "root=0"]),
        "inner axis of allgather": (lambda: hk.allgather(x[:, :1] if odd else x), ["[20000, 1]", "first axis"]),
        "inner axis of alltoall": (
            lambda: hk.alltoall(x[:, : 2 - odd], [LARGE] + [0] * (size - 1)),
            ["[20000, 1]", "first axis"],
        ),
        "reducescatter": (lambda: hk.reducescatter(x[:5] if odd else x[:6]), ["[5, 2]", "[6, 2]"]),
        "broadcast_object": (lambda: hk.broadcast_object(1, int(odd)), ["root=1", "root=0"]),
    }


def test_unlike_calls_are_an_error_on_every_rank(rank, size):
    for _, (call, words) in printed(unlike(rank == size - 1, size).items()):
        assert_mismatch(call, words)
        assert_usable(rank, size)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this object stays at home")


class Unprintable:
    def __repr__(self):
        raise RuntimeError("this object has no name")


BAD_ARGUMENTS = {
    "a string": (lambda: hk.allreduce("text"), TypeError, "str"),
    "an object": (lambda: hk.allgather(np.array([{}, {}])), TypeError, "object"),
    "a ragged list": (lambda: hk.allgather([[1, 2], [3]]), ValueError, "inhomogeneous"),
    "a sparse tensor": (lambda: hk.allreduce(tf.sparse.eye(3)), TypeError, "SparseTensor"),
    "complex": (lambda: hk.allreduce(np.ones(3, complex)), TypeError, "complex128"),
    "complex moved": (lambda: hk.allgather(np.ones(3, complex)), TypeError, "complex128"),
    "strings moved": (lambda: hk.broadcast(tf.constant(["a"])), TypeError, "string"),
    "uint64": (lambda: hk.allreduce(np.ones(3, np.uint64)), TypeError, "uint64"),
    "an unknown op": (lambda: hk.allreduce(1.0, "sum"), ValueError, "op: got sum"),
    "Adasum of integers": (lambda: hk.allreduce(1, hk.Adasum), TypeError, "Adasum"),
    "True as op": (lambda: hk.allreduce(1.0, True), ValueError, "op: got True"),
    "True as root": (lambda: hk.broadcast(1, True), ValueError, "root: got True"),
    "a factor": (lambda: hk.allreduce(1.0, prescale_factor=float("nan")), ValueError, "prescale_factor"),
    "ranks of a set": (lambda: hk.ProcessSet([0, 0]), ValueError, "ranks"),
    "no set": (lambda: hk.allreduce(1.0, process_set=[0]), TypeError, "process_set"),
    "no set, and no text": (lambda: hk.allreduce(1.0, process_set=Unprintable()), RuntimeError, "has no name"),
    "no axis": (lambda: hk.allreduce(1.0, process_set="rows"), ValueError, "rows"),
    "both": (lambda: hk.allreduce(1.0, process_set="data", group="data"), ValueError, "either process_set or group"),
    "a tuple of unlike arrays": (lambda: hk.allreduce((np.ones(2), np.ones(3))), ValueError, "one shape"),
    "no op": (lambda: hk.allreduce(1.0, None), ValueError, "op: got None"),
    "a list as op": (lambda: hk.allreduce(1.0, [1]), ValueError, "op"),
    "Min scattered": (lambda: hk.reducescatter(np.ones(4), hk.Min), ValueError, "op: got Min"),
    "Min by number": (lambda: hk.reducescatter(np.ones(4), 3), ValueError, "op: got Min"),
    "a number scattered": (lambda: hk.reducescatter(1.0), ValueError, "axis"),
    "root too high": (lambda: hk.broadcast(1, hk.size()), ValueError, "root"),
    "root negative": (lambda: hk.broadcast(1, -1), ValueError, "root"),
    "root no number": (lambda: hk.broadcast_object(1, "chief"), ValueError, "root"),
    "root of variables": (lambda: hk.broadcast_variables([tf.Variable(1.0)], hk.size()), ValueError, "root"),
    "no variables": (lambda: hk.broadcast_variables([np.ones(3)]), TypeError, "variables"),
    "short splits": (lambda: hk.alltoall(np.ones(4), [4] * (hk.size() + 1)), ValueError, "splits"),
    "splits beyond the rows": (lambda: hk.alltoall(np.ones(4), [5] + [0] * (hk.size() - 1)), ValueError, "4 rows"),
    "splits below the rows": (lambda: hk.alltoall(np.ones(4), [3] + [0] * (hk.size() - 1)), ValueError, "4 rows"),
    "negative splits": (lambda: hk.alltoall(np.ones(4), [-1] * hk.size()), ValueError, "splits"),
    "fractional splits": (lambda: hk.alltoall(np.ones(4), [4.0] + [0.0] * (hk.size() - 1)), ValueError, "splits"),
    "an object that cannot be pickled": (lambda: hk.allgather_object(Unpicklable()), TypeError, "stays at home"),
    "a root object that cannot be pickled": (
        lambda: hk.broadcast_object(Unpicklable(), hk.size() - 1),
        TypeError,
        "stays at home",
    ),
}


@pytest.mark.core(2, 3)
@pytest.mark.ranks(1, 2, 3)
def test_bad_arguments_are_an_error_on_every_rank(rank, size):
    """If one rank is at fault, it gets the specific error, and the other ranks one that names that rank."""
    for name, (bad, kind, words) in printed(BAD_ARGUMENTS.items()):
        of_root = name.startswith("a root object")
        others = hk.CollectiveMismatchError if of_root else kind
        with pytest.raises(kind if rank == size - 1 else others, match=words):
            bad()
        assert_usable(rank, size)
        with pytest.raises(kind if rank == size - 1 else hk.CollectiveMismatchError, match=words) as error:
            if rank == size - 1:
                bad()
            elif of_root:
                hk.broadcast_object(1, size - 1)
            else:
                hk.barrier()
        assert rank == size - 1 or f"rank {size - 1}" in str(error.value)
        assert_usable(rank, size)


def graph_mistakes(odd, size):
    x = tf.ones([3])
    return {
        "dtype reduced": lambda: hk.allreduce(tf.ones([3], tf.float64 if odd else tf.float32)),
        "integers": lambda: hk.allreduce(tf.ones([3], tf.int64 if odd else tf.int32), hk.Sum),
        "op": lambda: hk.allreduce(x, hk.Max if odd else hk.Sum),
        "average": lambda: hk.allreduce(x, hk.Average if odd else hk.Sum),
        "average of integers": lambda: hk.allreduce(tf.ones([3], tf.int64), hk.Average if odd else hk.Sum),
        "average of float64": lambda: hk.allreduce(tf.ones([3], tf.float64), hk.Average if odd else hk.Sum),
        "op scattered": lambda: hk.reducescatter(x, hk.Average if odd else hk.Sum),
        "kind": lambda: hk.allgather(x) if odd else hk.allreduce(x),
        "kind of moving": lambda: hk.alltoall(x, [3] + [0] * (size - 1)) if odd else hk.allgather(x),
        "scattered and reduced": lambda: hk.reducescatter(x) if odd else hk.allreduce(x),
        "number of tensors": lambda: hk.grouped_allreduce([x] * (2 + odd)),
        "one tensor or two": lambda: hk.grouped_allreduce([x] * (1 + odd)),
        "as many numbers in two tensors": lambda: hk.grouped_allreduce([x, x] if odd else [tf.ones([6])]),
        "number of dtypes": lambda: hk.grouped_allreduce([x, tf.ones([3], tf.float64 if odd else tf.float32)]),
        "number of gathered tensors": lambda: hk.grouped_allgather([x] * (2 + odd)),
        "number of scattered tensors": lambda: hk.grouped_reducescatter([x] * (1 + odd)),
        "splits": lambda: hk.alltoall(x, tf.constant([3 - odd] + [0] * (size - 1))),
        "splits known before": lambda: hk.alltoall(x, [3 - odd] + [0] * (size - 1)),
        "splits of 8 bytes": lambda: hk.alltoall(
            tf.ones([3, 2], tf.float64), tf.constant([3 - odd] + [0] * (size - 1))
        ),
        "shape": lambda: hk.allreduce(tf.ones([3 - odd])),
        "dtype": lambda: hk.allgather(tf.ones([3], tf.float64 if odd else tf.float32)),
        "root": lambda: hk.broadcast(tf.ones([3]), int(odd)),
        "gathered axis": lambda: hk.allgather(tf.ones([3, 2 - odd])),
        "grouped shape": lambda: hk.grouped_allreduce([tf.ones([2]), tf.ones([3 - odd])]),
    }


def test_unlike_tensors_inside_graphs_are_an_error_on_every_rank(rank, size):
    for _, call in printed(graph_mistakes(rank == size - 1, size).items()):
        with pytest.raises(tf.errors.OpError, match=r"(?i)mismatched"):
            tf.function(call, autograph=False)()
        assert_usable(rank, size)


@pytest.mark.ranks(1, 2, 3)
def test_splits_inside_graphs_are_checked_before_anything_is_sent(rank, size):
    """Horovod itself would drop the rows that splits leave out; here the error does not involve the peers."""
    step = tf.function(lambda x, splits: hk.alltoall(x, splits), autograph=False)
    for splits in printed([[5], [3], [-1, 5], [1, 1, 1, 1, 0]]):
        wrong = splits if len(splits) > size else splits + [0] * (size - len(splits))
        with pytest.raises(tf.errors.InvalidArgumentError, match="splits: expected one non-negative row count"):
            step(tf.ones([4]), tf.constant(wrong))
        assert_usable(rank, size)


def test_variables_that_differ_are_named_and_left_alone(rank, size):
    odd = rank == size - 1
    lists = {
        "shape": [tf.Variable(tf.fill([2 + odd], float(rank)), name="weights")],
        "dtype": [tf.Variable(tf.fill([2], tf.cast(rank, tf.float64 if odd else tf.float32)), name="weights")],
        "number": [tf.Variable(float(rank), name="weights")] * (2 + odd),
    }
    for name in printed(lists):
        variables = lists[name]
        with pytest.raises(hk.CollectiveMismatchError, match=rf"weights.*rank {size - 1}|rank {size - 1} has 3"):
            hk.broadcast_variables(variables)
        assert (variables[0].numpy() == rank).all()
        assert_usable(rank, size)
