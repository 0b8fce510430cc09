"""Digests of a few rows: equal for equal data, different for another dtype, shape, length or sampled row."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from helpers.cases import case

from hvdkit.collectives.digests import digest_in_any_order, digest_of_batch, hash_of
from hvdkit.data.arrays import digest_of_rows

ROWS = np.arange(60.0).reshape(20, 3)


def changed(at):
    array = ROWS.copy()
    array[at] += 1
    return array


def test_arrays_differ_by_length_dtype_shape_and_sampled_rows():
    def digest(*arrays):
        return digest_of_rows([array.__getitem__ for array in arrays], len(arrays[0]))

    kinds, _ = digest(ROWS, np.array(["a", None] * 10))
    assert kinds == ["float64[20, 3]", "object[20]"] and digest(ROWS) == digest(ROWS.copy())
    for name, arrays in {
        "length": (ROWS[:19],),
        "dtype": (ROWS.astype(np.float32),),
        "shape": (ROWS[:, :, None],),
        "first row": (changed((0, 0)),),
        "last row": (changed((-1, 2)),),
        "strings": (ROWS, np.array(["a", "b"] * 10, object)),
    }.items():
        with case(changed=name):
            assert digest(*arrays) not in (digest(ROWS), digest(ROWS, np.array(["a", "c"] * 10, object)))
    assert digest(ROWS[:0]) == (["float64[0, 3]"], digest(np.zeros((0, 9)))[1])


def test_batches_differ_by_ends_length_and_structure_in_graphs_and_eagerly():
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(6), [1, 2, 3])
    batch = {"x": tf.constant(ROWS), "ids": ragged, "scale": tf.constant(2.0), "none": None}
    usual = int(digest_of_batch(batch))
    assert int(tf.function(digest_of_batch)(batch)) == usual
    for name, part in {
        "first row": {"x": tf.constant(changed((0, 0)))},
        "last row": {"x": tf.constant(changed((-1, 0)))},
        "length": {"x": tf.constant(ROWS[[0, 1, -1]])},
        "scalar": {"scale": tf.constant(3.0)},
        "ragged rows": {"ids": tf.RaggedTensor.from_row_lengths(tf.range(6), [2, 1, 2, 1])},
    }.items():
        with case(changed=name):
            assert int(digest_of_batch({**batch, **part})) != usual
    assert int(digest_of_batch({**batch, "x": tf.constant(changed((7, 0)))})) == usual  # only its ends are read
    assert int(hash_of([tf.constant(changed((7, 0)))])) != int(hash_of([tf.constant(ROWS)]))


def test_the_rows_of_batches_have_a_digest_in_any_order():
    """Equal for another order and other batches of the same rows; different for a row that differs or is missing."""

    def batch(order, x=ROWS):
        order = list(order)
        ragged = tf.ragged.constant([[i] * (i % 3) for i in order], tf.int64)
        more = {"name": tf.constant([str(i) for i in order]), "half": tf.constant(x[order], tf.bfloat16)}
        return {"x": tf.constant(x[order]), "flag": tf.constant(order) > 3, "ids": ragged, "none": None, **more}

    def digest(*batches):
        return sum(int(digest_in_any_order(each)) for each in batches) % 2**64

    usual = digest(batch(range(20)))
    assert int(tf.function(digest_in_any_order)(batch(range(20)))) % 2**64 == usual
    assert digest(batch(reversed(range(20)))) == digest(batch(range(0, 20, 2)), batch(range(1, 20, 2))) == usual
    swapped = ROWS.copy()
    swapped[[0, 1], 0] = ROWS[[1, 0], 0]  # the same sums of columns
    for name, other in {
        "missing row": batch(range(19)),
        "repeated row": batch([0, *range(19)]),
        "number": batch(range(20), changed((7, 1))),
        "swapped numbers": batch(range(20), swapped),
    }.items():
        with case(changed=name):
            assert digest(other) != usual
    assert digest({"x": tf.zeros([0, 3])}) == digest({"x": tf.constant(1.0)}) == 0  # no rows
    wide = np.zeros((2, 5000), np.uint8)
    assert digest({"x": tf.constant(wide)}) != digest({"x": tf.constant(wide + 1)})
