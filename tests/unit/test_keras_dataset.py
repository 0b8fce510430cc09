"""Passes of TensorFlow over global batches."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from helpers.speed import wait_until

from hvdkit.data.keras_dataset import _NOT_STARTED, _Passes


def test_a_batch_that_is_read_while_the_dataset_is_deleted_leaves_nothing_open():
    opened, closed = [], []

    def open_at(epoch, step):
        opened.append(step)
        try:
            for number in range(step, 10):
                yield 1, np.array([number])
        finally:
            closed.append(step)

    passes = _Passes(open_at, lambda: (0, 0, 0), 10, [tf.TensorSpec([1], tf.int64)])
    at, first = passes.read(_NOT_STARTED)
    passes.close()
    at, second = passes.read(at)  # TensorFlow's thread was in this call
    assert (first, second) == (0, 1) and opened == [0, 1] and closed == [0]
    at, third = passes.read(at)  # an iterator that is still read
    assert third == 2 and opened == [0, 1]
    wait_until(lambda: closed == [0, 1])
