"""The ranks of a real world see the parts of the batches that one process would see."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import hvdkit as hk

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

from inputs import Distortion, distorted_inputs

pytestmark = pytest.mark.contract

hk.init()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(45, 3)).astype(np.float32)
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.1 * RNG.normal(size=(45, 1))).astype(np.float32)


def alone(*args, **options):
    """The same iterator as one process has it."""
    return hk.data.GlobalBatches(*args, rank=0, size=1, **options)


def sources(folder):
    X.tofile(folder / f"rows-{hk.rank()}")
    yield X
    yield np.memmap(folder / f"rows-{hk.rank()}", np.float32, "r", shape=X.shape)
    yield tf.data.Dataset.from_tensor_slices(X)


@pytest.mark.parametrize("batch_size", [8, 11, 64])
@pytest.mark.parametrize("options", [{}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "remainder": "drop"}])
def test_local_batches_make_the_global_batch(batch_size, options, tmp_path):
    if batch_size > len(X) and "remainder" in options:
        with pytest.raises(ValueError, match="at least one batch"):
            hk.data.GlobalBatches(X, batch_size, **options)
        return
    for source in sources(tmp_path):
        batches = hk.data.GlobalBatches(source, batch_size, epochs=2, **options)
        whole = alone(source, batch_size, epochs=2, **options)
        for expected in whole:
            local = next(batches)
            first, last = batches.local_rows
            assert len(local) == last - first
            np.testing.assert_array_equal(hk.allgather(np.asarray(local)), expected)
            np.testing.assert_array_equal(hk.allgather(batches.mask), whole.mask)
            assert hk.allreduce(np.int64(batches.count), op=hk.Sum) == batches.global_count == whole.count
        assert next(batches, None) is None
        assert batches.step == whole.step == 2 * whole.steps_per_epoch


def test_average_over_ranks_is_the_global_mean_and_trains_alike():
    batches = hk.data.GlobalBatches((X, Y), 11, shuffle_seed=1)
    whole = alone((X, Y), 11, shuffle_seed=1)
    w = np.zeros((3, 1))
    reference = np.zeros((3, 1))
    for _ in range(12):  # over two short batches of one example
        x, y = next(batches)
        error = x @ w - y
        loss = hk.allreduce(np.mean(batches.sample_weight * error[:, 0] ** 2))
        gradient = hk.allreduce(x.T @ (batches.sample_weight[:, None] * error) * 2 / len(x))
        x, y = (leaf[whole.mask] for leaf in next(whole))
        error = x @ reference - y
        np.testing.assert_allclose(loss, np.mean(error**2), rtol=1e-5)
        w -= 0.1 * gradient
        reference -= 0.1 * x.T @ error * 2 / len(x)
    np.testing.assert_allclose(w, reference, rtol=1e-5)


def test_state_and_fingerprint_are_the_same_on_every_rank():
    batches = hk.data.GlobalBatches((X, Y), 11, shuffle_seed=1)
    for _ in range(7):
        next(batches)
    whole = alone((X, Y), 11, shuffle_seed=1)
    whole.restore(batches.state)
    assert all(state == whole.state for state in hk.allgather_object(batches.state))
    assert all(mark == whole.fingerprint() for mark in hk.allgather_object(batches.fingerprint()))
    resumed = hk.data.GlobalBatches((X, Y), 11, shuffle_seed=1)
    resumed.restore(hk.broadcast_object(whole.state))
    for _ in range(9):
        np.testing.assert_array_equal(hk.allgather(next(resumed)[0]), next(whole)[0])


def test_fingerprint_tells_which_rank_has_other_data():
    x = X.copy()
    x[0, 0] += hk.rank() == hk.size() - 1
    marks = hk.allgather_object(hk.data.GlobalBatches(x, 8).fingerprint())
    assert len({mark["rows"] for mark in marks}) == min(hk.size(), 2)


def test_a_batch_smaller_than_the_world_is_refused_on_every_rank():
    if hk.size() == 1:
        next(hk.data.GlobalBatches(X, 1))
        return
    with pytest.raises(ValueError, match=f"at least {hk.size()}, the number of ranks"):
        hk.data.GlobalBatches(X, hk.size() - 1)


def test_images_are_distorted_alike():
    images = RNG.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    batches = hk.data.GlobalBatches(images, 9, shuffle_seed=0)
    whole = alone(images, 9, shuffle_seed=0)
    for step in range(3):
        options = {"seed": [5, step], "global_batch_size": 9, "distortion": Distortion()}
        local = distorted_inputs(next(batches), first_row=batches.local_rows[0], **options)
        expected = distorted_inputs(next(whole), first_row=0, **options)
        np.testing.assert_allclose(hk.allgather(local), expected, atol=1e-6)


def test_keras_passes_make_the_global_batches():
    local = hk.data.GlobalBatches((X, Y), 11, shuffle_seed=2).as_keras()
    whole = alone((X, Y), 11, shuffle_seed=2)
    for _ in range(2):
        for x, y, weight in local:
            expected, _ = next(whole)
            np.testing.assert_array_equal(hk.allgather(x), expected)
            mean = hk.allreduce(tf.reduce_mean(weight[:, None] * y))
            np.testing.assert_allclose(mean, targets_of(expected[whole.mask]).mean(), rtol=1e-4, atol=1e-6)


def targets_of(x):
    return np.concatenate([Y[(row == X).all(axis=1)] for row in x])
