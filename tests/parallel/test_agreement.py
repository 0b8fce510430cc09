"""Agreements of real ranks: which rank the error names, and that all ranks raise it."""

import pytest
import tensorflow as tf

import hvdkit as hk
from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.supervisor.lockstep import lockstep

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.core]


@pytest.fixture(autouse=True)
def usable_afterwards(rank, size):
    yield
    assert hk.allgather_object(rank) == list(range(size))


class Broken:
    """Data that cannot be read on the last rank."""

    def __init__(self, ok):
        self.ok = ok

    def fingerprint(self):
        if not self.ok:
            raise OSError("disk full")
        return {"rows": 9}

    def __iter__(self):
        yield from range(3)
        if not self.ok:
            raise OSError("disk full")
        yield from range(3, 9)


def supervised(folder, data, **scalars):
    with hk.Supervisor(folder, data=data, variables=tf.Variable(1.0), summary_steps=1) as sv:
        sv.step(**scalars)


@pytest.mark.parametrize(
    ("call", "own"),
    [
        (lambda folder, ok: list(lockstep(Broken(ok))), OSError),
        (lambda folder, ok: supervised(folder, Broken(ok)), OSError),
        (lambda folder, ok: supervised(folder, None, loss=1.0 if ok else "none"), TypeError),
    ],
    ids=["batches", "fingerprint", "scalar"],
)
def test_what_one_rank_raises_on_its_way_to_a_comparison_is_an_error_on_all(call, own, shared_path, rank, size):
    last = size - 1
    with pytest.raises(own if rank == last else hk.CollectiveMismatchError) as caught:
        call(shared_path, rank != last)
    if rank != last:
        assert f"rank {last} raised {own.__name__}: " in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gather(cluster.exchange(), "this call", int),
        lambda: list(lockstep([1, 2])),
        lambda: hk.layers.RowParallelDense(3)._all_inputs(2),
    ],
    ids=["gather", "lockstep", "layer"],
)
def test_a_rank_in_another_collective_is_named(call, rank, size):
    if size == 1:
        pytest.skip("takes two ranks")
    with pytest.raises(hk.CollectiveMismatchError, match=r"collective: .*barrier"):
        hk.barrier() if rank == 0 else call()
