"""Collectives in process sets: named by users, mesh axes, overlapping, uneven and of single ranks."""

from __future__ import annotations

import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.pairwise import pairs, printed

import hvdkit as hk

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.core(1, 2, 4)]

OVER_MPI = hk.cluster.exchange().over_mpi
SMALL, LARGE = 3, 20_000


@pytest.fixture(scope="module")
def sets():
    """Return all ranks but the last; the last two; each rank alone; all ranks in another order."""
    size = hk.size()
    if not OVER_MPI:
        pytest.skip("under Gloo sets need HOROVOD_DYNAMIC_PROCESS_SETS=1")
    listed = [range(max(1, size - 1)), range(max(0, size - 2), size), *([r] for r in range(size))]
    return [hk.ProcessSet(list(ranks)) for ranks in listed] + [hk.ProcessSet(list(range(size))[::-1])]


def in_mode(mode, function, *arguments):
    return (tf.function(function, autograph=False) if mode == "graph" else function)(*arguments)


def test_what_a_set_knows(sets, rank, size):
    for one in sets:
        assert one.ranks == tuple(sorted(one.ranks)) and one.size() == len(one.ranks)
        assert one.included() == (rank in one.ranks)
        assert one.rank() == (one.ranks.index(rank) if rank in one.ranks else None)
    assert sets[-1].ranks == tuple(range(size))


def test_every_collective_within_each_set(sets, rank):
    """Sets overlap: each rank reaches them in turn, with different peers."""
    for mode, n in printed(pairs(mode=["eager", "graph"], n=[SMALL, LARGE])):
        for one in sets:
            if not one.included():
                continue
            ranks, index = one.ranks, one.rank()
            x = tf.fill([n, 2], float(rank + 1))
            run = lambda f, *a, **k: in_mode(mode, lambda x: f(x, *a, process_set=one, **k), x)  # noqa: B023, E731
            assert (run(hk.allreduce, hk.Sum).numpy() == sum(r + 1 for r in ranks)).all()
            np.testing.assert_allclose(run(hk.allreduce), np.mean([r + 1 for r in ranks]), rtol=1e-6)
            assert (run(hk.allreduce, hk.Max).numpy() == max(ranks) + 1).all()
            gathered = run(hk.allgather).numpy()
            np.testing.assert_array_equal(gathered, np.repeat([[r + 1.0] * 2 for r in ranks], n, axis=0))
            assert (run(hk.broadcast, ranks[-1]).numpy() == ranks[-1] + 1).all()
            splits = np.full(len(ranks), n // len(ranks))
            splits[0] += n - splits.sum()
            rows, counts = run(hk.alltoall, splits)
            np.testing.assert_array_equal(rows, np.repeat([[r + 1.0] * 2 for r in ranks], splits[index], axis=0))
            assert counts.numpy().tolist() == [splits[index]] * len(ranks)
            part = run(hk.reducescatter, hk.Sum).numpy()
            assert part.shape == (n // len(ranks) + (index < n % len(ranks)), 2)
            assert (part == sum(r + 1 for r in ranks)).all()
        hk.barrier()


def test_objects_and_barriers(sets, rank):
    for one in sets:
        if one.included():
            assert hk.allgather_object(rank, process_set=one) == list(one.ranks)
            assert hk.broadcast_object(rank, one.ranks[-1], group=one) == one.ranks[-1]
            hk.barrier(process_set=one)


def test_gradients_within_a_set(sets, rank):
    one = sets[0]
    if one.included():
        x = tf.constant([rank + 1.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hk.allreduce(x, hk.Sum, process_set=one) * (rank + 1))
        assert tape.gradient(loss, x).numpy().tolist() == [sum(r + 1.0 for r in one.ranks)]
    hk.barrier()


def test_a_weighted_tape_within_a_set(sets, rank, size):
    """A layer that couples ranks makes the tape weight the loss; its gradients are still combined within the set."""
    layer = keras.layers.BatchNormalization(synchronized=True)
    layer.build((1, 2))
    hk.layers.synchronize_batch_normalization(layer)
    variable, table = tf.Variable(2.0), hk.PartitionedVariable([size, 2])
    for one in (sets[2 + rank], sets[0]):
        if one.included():
            with hk.DistributedGradientTape(tf.GradientTape(), weight=rank + 1.0, process_set=one) as tape:
                loss = variable * rank
            expected = np.average(one.ranks, weights=[r + 1 for r in one.ranks])
            np.testing.assert_allclose(tape.gradient(loss, variable), expected, rtol=1e-6)
            with hk.DistributedGradientTape(tf.GradientTape(), weight=1.0, process_set=one) as tape:
                loss = tf.reduce_sum(table.local)
            if size > 1:
                with pytest.raises(ValueError, match="process_set"):
                    tape.gradient(loss, table.local)
    hk.barrier()


@pytest.mark.ranks(2, 3)
def test_a_rank_outside_of_the_set_is_refused(sets, rank, size):
    one = sets[0]
    if not one.included():
        with pytest.raises(ValueError, match="a set that contains the caller"):
            hk.allreduce(1.0, process_set=one)
        with pytest.raises(ValueError, match="a set that contains the caller"):
            tf.function(lambda: hk.allreduce(tf.ones([2]), process_set=one))()
    hk.barrier()


@pytest.mark.ranks(2, 3)
def test_a_root_outside_of_the_set_is_refused(sets, rank, size):
    one = sets[0]
    if one.included():
        with pytest.raises(ValueError, match="root"):
            hk.broadcast(1.0, size - 1, process_set=one)
    hk.barrier()


@pytest.mark.ranks(2, 3)
def test_unlike_sets_are_an_error_everywhere(rank, size):
    if not OVER_MPI:
        return
    with pytest.raises(hk.CollectiveMismatchError, match="ProcessSet"):
        hk.ProcessSet([0] if rank == 0 else [1])
    with pytest.raises(ValueError if rank == 0 else hk.CollectiveMismatchError, match="rank"):
        hk.ProcessSet([size] if rank == 0 else [0])


def test_a_set_made_between_steps_of_a_graph(sets, rank, size):
    """Graphs traced before keep working: their sets do not change."""
    one = sets[0]
    step = tf.function(lambda x: hk.allreduce(x, hk.Sum, process_set=one if one.included() else None))
    everyone = tf.function(lambda x: hk.allreduce(x, hk.Sum))
    if one.included():
        assert float(step(tf.constant(1.0))) == one.size()
    assert float(everyone(tf.constant(1.0))) == size
    hk.ProcessSet([size - 1, 0] if size > 1 else [0])
    if one.included():
        assert float(step(tf.constant(1.0))) == one.size()
    assert float(everyone(tf.constant(1.0))) == size


def test_axes_of_the_mesh(size):
    assert hk.allreduce(1, hk.Sum, process_set="data") == size
    assert float(tf.function(lambda: hk.allreduce(tf.constant(1.0), hk.Sum, group="data"))()) == size


class Interrupted(Exception):
    """Raised by a signal handler, like KeyboardInterrupt."""


@pytest.mark.ranks(3, 4)
def test_an_exchange_that_was_interrupted_is_not_continued(rank, size):
    """Its messages could be matched with those of the next one. Other exchanges continue."""
    pair = hk.ProcessSet([0, 1])

    def interrupt(*_):
        raise Interrupted

    if rank == 1:  # rank 0 never calls it
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            hk.barrier(process_set=pair)
        signal.signal(signal.SIGALRM, before)
        with pytest.raises(hk.ClusterError, match=r"was interrupted \(Interrupted"):
            hk.allreduce(1, process_set=pair)
    assert hk.allreduce(1, hk.Sum) == size
