"""Which losses and metric functions are means of their rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cases import case

from hvdkit.keras.loss_scopes import BATCH, ROWS, UNKNOWN, scope_of

ops = keras.ops
RNG = np.random.default_rng(0)
LABELS = RNG.integers(1, 5, (8, 6)).astype("float32")
PREDICTIONS = RNG.uniform(0.1, 0.9, (8, 6)).astype("float32")


def masked_mean(is_padding):
    def loss(y, p):
        mask = ops.cast(ops.logical_not(is_padding(y)), "float32")
        return ops.sum(ops.abs(y - p) * mask) / ops.sum(mask)

    return loss


def halves(y, p):
    return ops.mean(ops.square(p[::2] - p[1::2]))


MEANS = {
    "mean": lambda y, p: ops.mean(ops.square(y - p)),
    "rows": lambda y, p: ops.mean(ops.abs(y - p), axis=1),
    "cross-entropy": lambda y, p: keras.losses.sparse_categorical_crossentropy(y[:, 0], p),
}
COUPLED = {
    "root": lambda y, p: ops.sqrt(ops.mean(ops.square(y - p))),
    "variance": lambda y, p: ops.var(p, axis=0),
    "pairs": halves,
    "pairs of odd rows": lambda y, p: halves(y, p[:7]),
    "fixed size": lambda y, p: ops.mean(ops.reshape(p, (8, 6))),
    "mask of 0": masked_mean(lambda y: ops.equal(y, 0)),
    "mask of -1": masked_mean(lambda y: ops.equal(y, -1)),
    "mask of -100": masked_mean(lambda y: ops.equal(y, -100)),
    "a sum": lambda y, p: ops.sum(ops.square(y - p)),
}


def test_means_of_rows_and_what_compares_rows():
    for scope, functions in ((ROWS, MEANS), (BATCH, COUPLED)):
        for name, function in functions.items():
            with case(name=name):
                assert scope_of(function, LABELS, PREDICTIONS) == scope


def test_sums_of_rows_and_what_rows_do_not_show():
    assert scope_of(lambda y, p: ops.sum(ops.square(y - p)), LABELS, PREDICTIONS, is_sum=True) == ROWS
    assert scope_of(lambda y, p: ops.square(ops.sum(y - p)), LABELS, PREDICTIONS, is_sum=True) == BATCH
    mean = MEANS["mean"]
    assert scope_of(mean, LABELS[:1], PREDICTIONS[:1]) == UNKNOWN  # one row
    assert scope_of(mean, LABELS, PREDICTIONS[:4]) == UNKNOWN  # not one label for each row
    assert scope_of(mean, LABELS, np.full_like(PREDICTIONS, np.nan)) == UNKNOWN
    assert scope_of(lambda y, p: tf.constant(1.0), LABELS, PREDICTIONS) == UNKNOWN  # the same for any rows


def test_only_the_rows_are_changed():
    labels = LABELS.copy()
    scope_of(MEANS["mean"], labels, PREDICTIONS)
    np.testing.assert_array_equal(labels, LABELS)
    with pytest.raises(KeyboardInterrupt):
        scope_of(interrupted, LABELS, PREDICTIONS)


def interrupted(y, p):
    raise KeyboardInterrupt
