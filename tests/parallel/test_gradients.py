"""average_gradients against NumPy: dense gradients, None, weights, compression, and what must be rejected."""

import os
from itertools import cycle

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import assert_mismatch
from helpers.pairwise import pairs, printed

import hvdkit as hk

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.core(2, 3)]

FLOATS = ["float16", "bfloat16", "float32", "float64"]
OPS = [hk.Average, hk.Sum]
# Half a unit in the last place of each dtype, relative.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SHAPES = [(3, 2), (), (0, 4), (150, 150), (7,)]


def gradient_of(rank, dtype, shapes=SHAPES):
    """Return one rank's gradients, including a None."""
    rng = np.random.default_rng(7 + rank)
    grads = [rng.normal(size=s).astype(tf.as_dtype(dtype).as_numpy_dtype) for s in shapes]
    return [*grads[:2], None, *grads[2:]]


def tensors(grads):
    return [None if g is None else tf.constant(g) for g in grads]


def combined(by_rank, op, weights=None):
    """Return the docstring's formulas in float64, and the sum of absolute terms that errors are relative to."""
    w = np.ones(len(by_rank)) if weights is None else np.asarray(weights, np.float64)
    divisor = w.sum() if op == hk.Average else 1.0
    results, magnitudes = [], []
    for grads in zip(*by_rank, strict=True):
        if grads[0] is None:
            results.append(None)
            magnitudes.append(None)
            continue
        terms = [wr * g.astype(np.float64) for wr, g in zip(w, grads, strict=True) if wr > 0]
        total, magnitude = sum(terms), sum(np.abs(t) for t in terms)
        if not terms:
            total = magnitude = np.zeros_like(grads[0], np.float64)
        results.append(total / divisor if divisor else total * 0)
        magnitudes.append(magnitude / divisor if divisor else magnitude * 0)
    return results, magnitudes


def assert_combined(results, by_rank, op, weights=None, unit=None):
    expected, magnitudes = combined(by_rank, op, weights)
    assert isinstance(results, list) and len(results) == len(expected)
    for result, original, want, magnitude in zip(results, by_rank[0], expected, magnitudes, strict=True):
        if want is None:
            assert result is None
            continue
        name = tf.as_dtype(original.dtype).name
        assert result.dtype.name == name and result.shape == want.shape
        # Weighting, N - 1 additions and a division each round once, in both directions: 8 half units.
        error = np.abs(result.numpy().astype(np.float64) - want)
        assert (error <= 8 * (unit or UNIT[name]) * magnitude + 1e-300).all(), f"off by {error.max()}"


def assert_same_bits(results):
    flat = [x.numpy().tobytes() for g in results if g is not None for x in tf.nest.flatten(g, expand_composites=True)]
    assert all(other == flat for other in hk.allgather_object(flat))


def both_ways(call, *args):
    """Yield the results of ``call`` in eager mode and inside a graph."""
    yield call(*args)
    yield tf.function(call, autograph=False)(*args)


def test_dense_gradients_and_none(rank, size, crossed):
    for dtype, op in printed(crossed(dtype=FLOATS, op=OPS)):
        by_rank = [gradient_of(r, dtype) for r in range(size)]
        for results in both_ways(lambda g, op=op: hk.average_gradients(g, op=op), tensors(by_rank[rank])):
            assert_combined(results, by_rank, op)
            assert_same_bits(results)


def test_mixed_dtypes_keep_their_order(rank, size):
    by_rank = [[gradient_of(r, d, [(5, r_ + 1)])[0] for r_, d in enumerate(FLOATS * 2)] for r in range(size)]
    for results in both_ways(lambda: hk.average_gradients(tensors(by_rank[rank]))):
        assert_combined(results, by_rank, hk.Average)


def test_least_and_greatest(rank, size):
    by_rank = [gradient_of(r, "float32") for r in range(size)]
    for op, reduce in ((hk.Min, np.minimum.reduce), (hk.Max, np.maximum.reduce)):
        for results in both_ways(lambda g, op=op: hk.average_gradients(g, op=op), tensors(by_rank[rank])):
            for i, result in enumerate(results):
                if result is not None:
                    np.testing.assert_array_equal(result, reduce([grads[i] for grads in by_rank]))


def weight_kinds(w):
    return [w, float(w), np.float32(w), np.array(w), tf.constant(w), tf.constant(float(w)), keras.Variable(float(w))]


def test_weights_of_every_kind(rank, size, crossed):
    weights = [2 * r + 1 for r in range(size)]
    by_rank = [gradient_of(r, "float32") for r in range(size)]
    for weight, op in printed(crossed(weight=weight_kinds(weights[rank]), op=OPS)):
        call = lambda g, w=weight, op=op: hk.average_gradients(g, op=op, weight=w)  # noqa: E731
        for results in both_ways(call, tensors(by_rank[rank])):
            assert_combined(results, by_rank, op, weights)
            assert_same_bits(results)


def test_weights_that_are_no_whole_numbers(rank, size):
    weights = [0.1 * (r + 1) for r in range(size)]
    for dtype in printed(FLOATS):
        by_rank = [gradient_of(r, dtype) for r in range(size)]
        for results in both_ways(lambda g: hk.average_gradients(g, weight=weights[rank]), tensors(by_rank[rank])):
            assert_combined(results, by_rank, hk.Average, weights)


def test_a_weight_known_only_when_the_graph_runs(rank, size):
    weights = [3.0 * (r % 2) + 1 for r in range(size)]
    by_rank = [gradient_of(r, "float64") for r in range(size)]
    step = tf.function(lambda w: hk.average_gradients(tensors(by_rank[rank]), weight=w))
    assert_combined(step(tf.constant(weights[rank], tf.float64)), by_rank, hk.Average, weights)


@pytest.mark.ranks(2, 3)
def test_a_rank_without_examples_does_not_count(rank, size):
    """Its mean over no examples is 0/0."""
    weights = [4.0 * (r != size - 1) for r in range(size)]
    by_rank = [gradient_of(r, "float32") for r in range(size)]
    by_rank[-1] = [None if g is None else np.full_like(g, np.nan) for g in by_rank[-1]]
    for op in printed(OPS):
        call = lambda g, op=op: hk.average_gradients(g, op=op, weight=weights[rank])  # noqa: E731
        for results in both_ways(call, tensors(by_rank[rank])):
            assert_combined(results, by_rank, op, weights)


def test_no_rank_has_examples(rank, size):
    grads = [
        tf.constant([np.nan, 1.0]),
        tf.IndexedSlices(tf.fill([1, 2], np.nan), tf.constant([1]), tf.constant([3, 2])),
    ]
    for op in (hk.Average, hk.Sum):
        for dense, rows in both_ways(lambda op=op: hk.average_gradients(grads, op=op, weight=0)):
            assert dense.numpy().tolist() == [0, 0]
            assert tf.convert_to_tensor(rows).numpy().tolist() == [[0, 0]] * 3


def test_compression(rank, size, crossed):
    """Values are rounded to 16 bits for transport, at most once per addition, and keep their dtype."""
    all_weights = [None, [r + 1.0 for r in range(size)]]
    axes = {"dtype": ["float32", "float64"], "op": OPS, "compression": ["fp16", "bf16"], "weights": all_weights}
    for dtype, op, compression, weights in printed(crossed(**axes)):
        unit = UNIT["float16" if compression == "fp16" else "bfloat16"]
        by_rank = [gradient_of(r, dtype) for r in range(size)]
        options = {"op": op, "compression": compression, "weight": None if weights is None else weights[rank]}
        for results in both_ways(lambda g, o=options: hk.average_gradients(g, **o), tensors(by_rank[rank])):
            assert_combined(results, by_rank, op, weights, unit)
            assert_same_bits(results)


@pytest.mark.ranks(2, 4)
def test_compression_does_compress():
    """The exact average of equal numbers is that number; it is rounded because only 16 bits are sent."""
    for compression, step in printed([("fp16", 2.0**-12), ("bf16", 2.0**-10)]):
        result = hk.average_gradients([tf.constant([1.0 + step] * 9000)], compression=compression)[0].numpy()
        assert (result == 1.0).all(), "more than 16 bits travelled"


@pytest.mark.parametrize("compression", [None, "fp16", "bf16"])
def test_buckets_change_nothing_but_when_gradients_travel(compression, rank, size, monkeypatch):
    monkeypatch.setenv("HVDKIT_BUCKET_BYTES", "400")
    by_rank = [[np.full(n, (r + 1) * (n + 1), np.float32) for n in (90, 1, 120, 3, 5, 200)] for r in range(size)]
    for results in both_ways(lambda g: hk.average_gradients(g, compression=compression), tensors(by_rank[rank])):
        for n, result in zip((90, 1, 120, 3, 5, 200), results, strict=True):
            np.testing.assert_allclose(result, np.full(n, (size + 1) / 2 * (n + 1)), rtol=2.0**-8)
    step = tf.function(lambda g: hk.average_gradients(g, compression=compression))
    graph = step.get_concrete_function(tensors(by_rank[rank])).graph
    exchanges = [node for node in graph.get_operations() if node.type.startswith("Horovod")]
    # By number of elements: 200; 5, 3 and 120; 1 and 90. In 16 bits the last two are one bucket. bf16 needs two
    # exchanges for each.
    expected = {None: 3, "fp16": 2, "bf16": 4}[compression]
    assert len(exchanges) == (expected if size > 1 else 0), [node.name for node in exchanges]


@pytest.mark.nightly
@pytest.mark.ranks(2)
def test_more_gradients_than_horovod_remembers_by_default(rank, size, monkeypatch):
    """With 1080 names, and buckets sent while others are computed, jobs abort at Horovod's default capacity of 1024."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        pytest.skip("slow to trace, and the same under MPI")
    rng = np.random.default_rng(0)
    held = [tf.Variable(tf.ones([n])) for n in rng.choice([10, 1000, 30_000], 360)]
    steps, even = [], tf.fill([200, 200], 1 / 200)
    for nbytes in (200_000, 50_000, 400_000):
        monkeypatch.setenv("HVDKIT_BUCKET_BYTES", str(nbytes))

        @tf.function
        def step():
            x, gradients = even, []
            for number, v in enumerate(held):
                if number % 10 == 0:
                    x = tf.matmul(x, even)
                    factor = x[0, 0] * 200 * (1.0 + rank)
                gradients.append(v * factor)
            return tf.reduce_sum(tf.concat(hk.average_gradients(gradients), 0))

        step()
        steps.append(step)
    expected = sum(int(v.shape[0]) for v in held) * (1 + size) / 2
    for number in rng.integers(0, 3, 30):
        np.testing.assert_allclose(steps[number](), expected, rtol=1e-4)


def test_narrow_gradients_are_not_compressed_again(rank, size, crossed):
    """bfloat16 has less precision than float16, and float16 less range than bfloat16."""
    values = [("float16", 1.0 + 2.0**-10), ("bfloat16", 2.0**100)]
    for (dtype, value), compression in printed(crossed(values=values, compression=["fp16", "bf16"])):
        mine = both_kinds(value if rank == 0 else 0.0, dtype)
        call = lambda g, c=compression: hk.average_gradients(g, op=hk.Sum, compression=c)  # noqa: E731
        for results in both_ways(call, mine):
            for result in results:
                values = result.values if isinstance(result, tf.IndexedSlices) else result
                assert (values == tf.cast(value, dtype)).numpy().all()


def both_kinds(value, dtype):
    """Return a dense gradient, and a sparse one that is too large to be sent as a dense one."""
    rows = tf.IndexedSlices(tf.fill([2, 70_000], tf.cast(value, dtype)), tf.constant([0, 1]))
    return [tf.fill([5], tf.cast(value, dtype)), rows]


def test_large_weights_do_not_overflow_16_bits(rank, size):
    """256 examples with gradients of 300 sum to 76,800 before the mean is taken, beyond float16's 65,504."""
    weights = [256.0 * (r + 1) for r in range(size)]
    for dtype, compression in (("float16", None), ("float32", "fp16")):
        grads = [tf.fill([9000], tf.cast(300, dtype))]
        for results in both_ways(
            lambda g=grads, c=compression: hk.average_gradients(g, weight=weights[rank], compression=c)
        ):
            np.testing.assert_allclose(results[0], 300, rtol=4 * UNIT["float16"])


def bad_calls():
    """Return calls with bad arguments; those with bad gradients are in unit/test_optimizer_copies.py."""
    g = [tf.ones([2])]
    rows = tf.IndexedSlices
    slices = [rows(tf.ones([1, 2]), tf.constant([0]))]
    return {
        "a word": (lambda: hk.average_gradients(["1.0"]), TypeError, r"grads\[0\]: got str"),
        "words as rows": (lambda: hk.average_gradients([rows([[1.0]], ["a"])]), TypeError, r"grads\[0\]\.indices"),
        "variables": (lambda: hk.average_gradients(g, variables=[]), ValueError, "variables: got 0 of them"),
        "integers": (lambda: hk.average_gradients([tf.constant([3])]), TypeError, r"grads\[0\]: got int32"),
        "op": (lambda: hk.average_gradients(g, op="mean"), ValueError, "op"),
        "Max of rows": (lambda: hk.average_gradients(slices, op=hk.Max), ValueError, "sparse"),
        "Min with weight": (lambda: hk.average_gradients(g, op=hk.Min, weight=1), ValueError, "weight"),
        "Max compressed": (lambda: hk.average_gradients(g, op=hk.Max, compression="fp16"), ValueError, "compression"),
        "compression": (lambda: hk.average_gradients(g, compression="int8"), ValueError, "compression: got int8"),
        "negative weight": (lambda: hk.average_gradients(g, weight=-1), ValueError, "weight: got -1"),
        "NaN weight": (lambda: hk.average_gradients(g, weight=float("nan")), ValueError, "weight: got nan"),
        "infinite weight": (lambda: hk.average_gradients(g, weight=float("inf")), ValueError, "weight: got inf"),
        "two weights": (lambda: hk.average_gradients(g, weight=[1.0, 2.0]), ValueError, "weight"),
        "a word as weight": (lambda: hk.average_gradients(g, weight="heavy"), TypeError, "str"),
    }


@pytest.mark.ranks(1, 2, 3)
def test_bad_arguments_are_an_error_on_every_rank(rank, size):
    for _, (bad, kind, words) in printed(bad_calls().items()):
        with pytest.raises(kind, match=words):
            tf.function(bad, autograph=False)()
        with pytest.raises(kind if rank == size - 1 else hk.CollectiveMismatchError, match=words):
            bad() if rank == size - 1 else hk.average_gradients([tf.ones([2])])
        assert_combined(hk.average_gradients([tf.ones([2])]), [[np.ones(2, np.float32)]] * size, hk.Average)


class Peculiar(list):
    """Gradients that cannot be read and raise an error of an unusual class."""

    def __iter__(self):
        raise ArithmeticError("peculiar gradients")


def failures():
    """Return calls that fail on the calling rank, their error there, and the same calls without a fault."""
    variable, other = keras.Variable([1.0, 1.0]), keras.Variable([1.0, 1.0])
    plain = hk.DistributedOptimizer(keras.optimizers.SGD(0.1))
    divided = hk.DistributedOptimizer(keras.optimizers.Adam(0.1), shard_states=True)
    scaled = hk.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    clipped = hk.DistributedOptimizer(keras.optimizers.SGD(0.1), clip_global_norm=1.0)
    for each in (plain, divided, scaled, clipped):
        each.build([variable])
    good, beyond = tf.ones([2]), tf.IndexedSlices([1.0], [2], [2])

    def taped(used):
        with hk.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = variable * 2.0
        if used:
            tape._tape.gradient(loss, [variable.value])
        return tape.gradient(loss, [variable.value])

    def rows(index):
        return lambda: hk.average_gradients([tf.IndexedSlices(tf.ones([1, 2]), [index], [5, 2])])

    return {
        "they raise": (
            lambda: hk.average_gradients(Peculiar()),
            ArithmeticError,
            lambda: hk.average_gradients([good]),
        ),
        "a tape that was used": (lambda: taped(True), RuntimeError, lambda: taped(False)),
        "a row beyond the table": (rows(5), ValueError, rows(4)),
        "an unknown variable": (lambda: plain.apply([good], [other]), ValueError, lambda: plain.apply([good])),
        "too many": (lambda: plain.apply([good, good]), ValueError, lambda: plain.apply([good])),
        "no pairs": (lambda: plain.apply_gradients([]), ValueError, lambda: plain.apply([good], [variable])),
        "not in pairs": (lambda: plain.apply_gradients([None]), TypeError, lambda: plain.apply([good])),
        "words": (lambda: divided.apply(["word"]), TypeError, lambda: divided.apply([good])),
        "divided": (lambda: divided.apply(Peculiar(), [variable]), ArithmeticError, lambda: divided.apply([good])),
        "scaled": (lambda: scaled.apply([object()]), TypeError, lambda: scaled.apply([good])),
        "clipped": (lambda: clipped.apply([beyond]), ValueError, lambda: clipped.apply([good])),
    }


@pytest.mark.ranks(1, 2, 3)
def test_whatever_one_rank_raises_is_an_error_on_every_rank(rank, size):
    for _, (fails, kind, good) in printed(failures().items()):
        with pytest.raises(kind if rank == size - 1 else hk.CollectiveMismatchError):
            fails() if rank == size - 1 else good()
        good()
        assert hk.allgather_object(rank) == list(range(size))


KINDS = {
    "tensor": tf.constant,
    "array": np.array,
    "list": list,
    "tuple": lambda x: tuple(map(tuple, x)) if isinstance(x[0], list) else tuple(x),
}


VALUES = {
    **KINDS,
    "tensor": lambda x: tf.constant(x, tf.float32),
    "array": lambda x: np.array(x, "f4"),
    "rows of arrays": lambda x: [np.array(row, "f4") for row in x],
    "list of tensors": lambda x: [tf.constant(row, tf.float32) for row in x],
}


def with_gradient(variable, grad):
    """Return a number whose gradient a user-defined function returns, of any kind."""

    @tf.custom_gradient
    def number(x):
        return tf.reduce_sum(x), lambda upstream: grad

    return number(variable)


WAYS = ["average", "average in a graph", "tape", "apply", "apply in a graph"]
SHAPES_OF_ROWS = {**KINDS, "shape": tf.TensorShape, "unknown": None}


def test_gradients_of_every_kind(rank, size):
    kinds = zip(pairs(values=[*VALUES], op=OPS), cycle(KINDS), cycle(SHAPES_OF_ROWS), cycle(WAYS), strict=False)
    for (values, op), indices, shape, way in printed(kinds):
        check_gradients_of_a_kind(VALUES[values], KINDS[indices], SHAPES_OF_ROWS[shape], op, way, rank, size)


def check_gradients_of_a_kind(as_values, as_indices, as_shape, op, way, rank, size):
    """Optimizers cast whole numbers to the variable's dtype."""
    number = int if way.startswith("apply") else float
    dense = as_values([[number(1), number(2)], [number(3), number(rank + 1)]])
    dense_shape = None if as_shape is None else as_shape([4, 1])
    rows = tf.IndexedSlices(as_values([[rank + 1.0], [1.0], [1.0]]), as_indices([0, 2, 0]), dense_shape)
    total, divisor = size * (size + 1) / 2, size if op == hk.Average else 1
    want_dense = np.array([[size, 2 * size], [3 * size, total]]) / divisor
    want_rows = np.array([[total + size], [0.0], [size], [0.0]]) / divisor
    variables = [keras.Variable(np.zeros((2, 2), "f4")), keras.Variable(np.zeros((4, 1), "f4"))]

    def run(step):
        return tf.function(step, autograph=False)() if "graph" in way else step()

    if way.startswith("apply"):
        optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=op)
        optimizer.build(variables)
        run(lambda: optimizer.apply((dense, rows), variables))
        found = [-variables[0].numpy(), -variables[1].numpy()]
    elif way == "tape":
        with hk.DistributedGradientTape(tf.GradientTape(), op=op) as tape:
            loss = with_gradient(variables[0].value, np.array(dense, "f4")) + with_gradient(variables[1].value, rows)
        found = list(tape.gradient(loss, tuple(v.value for v in variables)))
    else:
        found = run(lambda: hk.average_gradients((dense, rows), op=op))
    assert found[0].dtype == "float32"
    np.testing.assert_allclose(found[0], want_dense)
    if as_shape is None and way.startswith("average"):
        found[1] = tf.IndexedSlices(found[1].values, found[1].indices, [4, 1])
    np.testing.assert_allclose(tf.convert_to_tensor(found[1]), want_rows)


def unlike(odd):
    """Return gradients that differ on one rank, and text that the message must contain."""
    g = tf.ones([2, 3])
    rows = lambda v=3, i=tf.int32: tf.IndexedSlices(tf.ones([1, v]), tf.zeros([1], i), tf.constant([9, v]))  # noqa: E731
    return {
        "shape": (lambda: hk.average_gradients([g[:1] if odd else g]), ["float32[1, 3]", "float32[2, 3]"]),
        "dtype": (lambda: hk.average_gradients([tf.cast(g, tf.float64) if odd else g]), ["float64", "float32"]),
        "number": (lambda: hk.average_gradients([g] * (1 + odd)), ["average_gradients"]),
        "None": (lambda: hk.average_gradients([None if odd else g]), ["none"]),
        "kind": (lambda: hk.average_gradients([rows() if odd else g]), ["sparse", "float32[2, 3]"]),
        "op": (lambda: hk.average_gradients([g], op=hk.Sum if odd else hk.Average), ["Sum", "Average"]),
        "compression": (lambda: hk.average_gradients([g], compression="fp16" if odd else None), ["fp16"]),
        "weight": (lambda: hk.average_gradients([g], weight=1 if odd else None), ["weight"]),
        "width of rows": (lambda: hk.average_gradients([rows(4 if odd else 3)]), ["[4]", "[3]"]),
        "index dtype": (lambda: hk.average_gradients([rows(i=tf.int64 if odd else tf.int32)]), ["int64", "int32"]),
        "shape behind rows": (
            lambda: hk.average_gradients(
                [tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]), tf.constant([8 + odd, 3]))]
            ),
            ["9, 3", "8, 3"],
        ),
        "shape known": (
            lambda: hk.average_gradients(
                [tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]), None if odd else [8, 3])]
            ),
            ["8, 3"],
        ),
    }


@pytest.mark.ranks(2, 3)
def test_unlike_gradients_are_an_error_on_every_rank(rank, size):
    for _, (call, words) in printed(unlike(int(rank == size - 1)).items()):
        assert_mismatch(call, words)
        assert hk.allgather_object(rank) == list(range(size))
