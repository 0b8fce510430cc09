"""Sparse gradients against NumPy: duplicates, empty ranks, both index dtypes, and the choice of the cheaper form."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from helpers.pairwise import pairs, printed

import hvdkit as hk

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.core(1, 2)]

# (rows of the table, width): tiny tables are sent dense with the other gradients; fewer rows than ranks; a large
# width; large tables, sent in the cheaper of both forms.
TABLES = {"tiny": (10, 3), "two rows": (2, 4), "one row": (1, 40_000), "large": (20_000, 4), "wide": (300, 700)}
USED = {"few": 20, "all": 1.0}


def ids_of(rank, size, table, used, rng):
    """Return the rows that a rank uses, repeated within and across ranks; the last of several ranks uses none."""
    rows = TABLES[table][0]
    if size > 1 and rank == size - 1:
        return np.zeros(0, np.int64)
    if used == "all":
        return np.concatenate([rng.permutation(rows), rng.integers(rows, size=5)])
    return rng.integers(min(rows, 12), size=20)


def gradients(size, table, used, dtype="float64"):
    """Return indices and values of every rank."""
    rng = np.random.default_rng(3)
    ids = [ids_of(r, size, table, used, rng) for r in range(size)]
    width = TABLES[table][1]
    return ids, [rng.normal(size=(len(i), width)).astype(tf.as_dtype(dtype).as_numpy_dtype) for i in ids]


def slices(ids, values, table, index_dtype="int64", shape="known"):
    """Return IndexedSlices whose dense shape is known, known only when the graph runs, or missing."""
    dense = {
        "known": tf.constant,
        "missing": lambda _: None,
        "late": lambda s: tf.numpy_function(lambda: np.array(s, np.int32), [], tf.int32),
    }
    whole = dense[shape](list(TABLES[table]))
    return tf.IndexedSlices(tf.constant(values), tf.cast(tf.constant(ids), index_dtype), whole)


def dense_of(ids, values, table):
    whole = np.zeros(TABLES[table], np.float64)
    np.add.at(whole, ids, values.astype(np.float64))
    return whole


def check(result, by_rank, table, op, weights=None, unit=2.0**-53, index_dtype="int64"):
    """Return the number of rows of ``result`` after comparing it with the formula."""
    ids, values = by_rank
    w = np.ones(len(ids)) if weights is None else np.asarray(weights)
    divisor = w.sum() if op == hk.Average else 1.0
    expected = sum(wr * dense_of(i, v, table) for wr, i, v in zip(w, ids, values, strict=True) if wr) / divisor
    magnitude = sum(wr * dense_of(i, np.abs(v), table) for wr, i, v in zip(w, ids, values, strict=True) if wr) / divisor
    assert isinstance(result, tf.IndexedSlices)
    indices = result.indices.numpy()
    assert result.indices.dtype.name == index_dtype and result.values.dtype == values[0].dtype
    assert len(set(indices)) == len(indices), "rows repeat"
    got = dense_of(indices, result.values.numpy(), table)
    assert (np.abs(got - expected) <= 30 * unit * magnitude + 1e-300).all()
    flat = (indices.tobytes(), result.values.numpy().tobytes())
    assert all(other == flat for other in hk.allgather_object(flat)), "ranks have other bits"
    return len(indices)


def both_ways(call):
    yield call()
    yield tf.function(call, autograph=False)()


@pytest.mark.core(1, 2)
def test_rows_are_summed_within_and_over_ranks(rank, size):
    for op, table, used in printed(pairs(op=[hk.Average, hk.Sum], table=[*TABLES], used=[*USED])):
        by_rank = gradients(size, table, used)
        mine = slices(by_rank[0][rank], by_rank[1][rank], table)
        for (result,) in both_ways(partial(hk.average_gradients, [mine], op=op)):
            check(result, by_rank, table, op)


@pytest.mark.parametrize(
    ("dtype", "index_dtype", "shape"),
    [
        ("float16", "int32", "known"),
        ("float16", "int64", "missing"),
        ("bfloat16", "int64", "known"),
        ("bfloat16", "int32", "late"),
        ("float32", "int32", "missing"),
        ("float32", "int64", "late"),
        ("float64", "int32", "known"),
        ("float64", "int64", "late"),
    ],
)
def test_dtypes_and_shapes(dtype, index_dtype, shape, rank, size):
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}[dtype]
    for table in ("tiny", "large"):
        by_rank = gradients(size, table, "few", dtype)
        mine = lambda t=table, b=by_rank: slices(b[0][rank], b[1][rank], t, index_dtype, shape)  # noqa: E731
        for (result,) in both_ways(lambda m=mine: hk.average_gradients([m()])):
            check(result, by_rank, table, hk.Average, unit=unit, index_dtype=index_dtype)


@pytest.mark.ranks(2, 3)
def test_rows_travel_where_they_are_fewer_bytes(rank, size):
    """The result contains only the used rows if sent as rows, and all rows if sent dense."""
    for used in USED:
        by_rank = gradients(size, "large", used)
        mine = slices(by_rank[0][rank], by_rank[1][rank], "large")
        touched = len(np.unique(np.concatenate(by_rank[0])))
        for (result,) in both_ways(partial(hk.average_gradients, [mine])):
            # With two ranks, one without rows, all rows of the other are still fewer bytes than two halves.
            dense = used == "all" and size > 2
            assert check(result, by_rank, "large", hk.Average) == (TABLES["large"][0] if dense else touched)


def test_weights(rank, size):
    """A rank with weight 0 does not count, even if it has NaN."""
    for table, used in printed(pairs(table=["tiny", "large"], used=[*USED])):
        ids, values = gradients(size, table, used)
        weights = [0.3 * (r + 1) for r in range(size)]
        if size > 1:
            weights[0] = 0.0
            values[0][:] = np.nan
        for op in (hk.Average, hk.Sum):
            mine = slices(ids[rank], values[rank], table)
            for (result,) in both_ways(partial(hk.average_gradients, [mine], op=op, weight=weights[rank])):
                check(result, (ids, values), table, op, weights)


def test_compression(rank, size):
    for table, used, compression in printed(pairs(table=["tiny", "large"], used=[*USED], compression=["fp16", "bf16"])):
        unit = {"fp16": 2.0**-11, "bf16": 2.0**-8}[compression]
        by_rank = gradients(size, table, used, "float32")
        mine = slices(by_rank[0][rank], by_rank[1][rank], table)
        for (result,) in both_ways(partial(hk.average_gradients, [mine], compression=compression)):
            check(result, by_rank, table, hk.Average, unit=unit)


def test_no_rank_has_rows(size):
    for table in TABLES:
        nothing = slices(np.zeros(0, np.int64), np.zeros((0, TABLES[table][1])), table)
        for (result,) in both_ways(lambda g=nothing: hk.average_gradients([g])):
            assert not result.values.numpy().any() and result.values.shape[1] == TABLES[table][1]


def test_many_tables_dense_gradients_and_none_in_their_order(rank, size):
    listed = [("large", "few"), None, ("tiny", "few"), "dense", ("large", "all"), ("wide", "few"), None, "dense"]
    by_rank = {kind: gradients(size, *kind) for kind in listed if isinstance(kind, tuple)}

    def one(kind):
        if isinstance(kind, tuple):
            ids, values = by_rank[kind]
            return slices(ids[rank], values[rank], kind[0])
        return None if kind is None else tf.fill([100], float(rank))

    for results in both_ways(lambda: hk.average_gradients([one(kind) for kind in listed])):
        for kind, result in zip(listed, results, strict=True):
            if isinstance(kind, tuple):
                check(result, by_rank[kind], kind[0], hk.Average)
            elif kind is None:
                assert result is None
            else:
                np.testing.assert_allclose(result, (size - 1) / 2, rtol=1e-6)


def test_values_with_more_axes_or_none(rank, size):
    ids = tf.constant([1, 0, 1])
    for shape in ([], [2, 3]):
        values = tf.ones([3, *shape]) * (rank + 1)
        for (result,) in both_ways(
            lambda v=values, s=shape: hk.average_gradients([tf.IndexedSlices(v, ids, tf.constant([4, *s]))], op=hk.Sum)
        ):
            whole = tf.convert_to_tensor(result).numpy()
            total = size * (size + 1) / 2
            assert whole.shape == (4, *shape)
            assert (whole[0] == total).all() and (whole[1] == 2 * total).all() and not whole[2:].any()
