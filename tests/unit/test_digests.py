"""Digests of variables, by which ranks compare them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdkit.collectives.digests import digest
from hvdkit.supervisor.divergence import DivergenceDetector

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint16", "int32", "int64", "uint64", "complex64"]


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_a_digest_tells_dtype_shape_and_every_bit(kind):
    seen = set()
    for dtype in DTYPES if kind is tf.Variable else DTYPES[:-1]:
        for shape in ([], [6], [2, 3], [0, 3]):
            variable = kind(tf.zeros(shape, dtype), dtype=dtype)
            seen.add(digest(variable))
            if shape == [2, 3]:
                ones = np.zeros(shape, tf.as_dtype(dtype).as_numpy_dtype)
                ones[1, 2] = 1
                variable.assign(tf.constant(ones))
                seen.add(digest(variable))
                assert digest(variable) == digest(kind(tf.constant(ones), dtype=dtype))
    assert len(seen) == 5 * len(DTYPES if kind is tf.Variable else DTYPES[:-1])


def test_digests_of_strings_and_of_what_is_no_variable():
    assert digest(tf.Variable(["a", "b"])) == digest(tf.Variable(["a", "b"])) != digest(tf.Variable(["a", "c"]))
    with pytest.raises(TypeError, match="variables: got ndarray"):
        digest(np.zeros(2))
    with pytest.raises(ValueError, match="every"):
        DivergenceDetector([], every=0)
