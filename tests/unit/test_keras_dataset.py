"""Passes of TensorFlow over global batches."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers.speed import wait_until

from hvdkit.data import GlobalBatches, keras_dataset
from hvdkit.data.keras_dataset import _NOT_STARTED, _Passes
from hvdkit.data.position import DataPosition
from hvdkit.data.reader import RankBatch


@pytest.mark.full
def test_a_batch_that_is_read_while_the_dataset_is_deleted_leaves_nothing_open(monkeypatch):
    opened, closed = [], []

    def read_on(plan, epoch, step, max_batches, *, is_endless):
        opened.append(step)
        try:
            for number in range(step, 10):
                yield RankBatch(np.array([number]), [1])
        finally:
            closed.append(step)

    monkeypatch.setattr(keras_dataset, "read_on", read_on)
    position = DataPosition(GlobalBatches(np.arange(10), 1, rank=0, size=1).plan)
    passes = _Passes(position, lambda batch: batch.rows, [tf.TensorSpec([1], tf.int64)], 1)
    at, first = passes.read(_NOT_STARTED)
    passes.close()
    at, second = passes.read(at)  # TensorFlow's thread was in this call
    assert (first, second) == (0, 1) and opened == [0, 1] and closed == [0]
    at, third = passes.read(at)  # an iterator that is still read
    assert third == 2 and opened == [0, 1]
    wait_until(lambda: closed == [0, 1])
