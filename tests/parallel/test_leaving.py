"""A rank that leaves after an exchange does not end the others, however late they finish that exchange."""

from __future__ import annotations

import time

import pytest

import hvdkit as hk
from hvdkit import cluster
from hvdkit.cluster import world
from hvdkit.cluster.exchange import ObjectExchange
from hvdkit.cluster.progress import collective

pytestmark = pytest.mark.ranks(2, 3)


class LateRequest:
    """An MPI request that is seen to be complete some time after it is, as on an overloaded machine."""

    def __init__(self, request, seconds):
        self._request, self._at = request, time.monotonic() + seconds

    def Test(self):
        return time.monotonic() >= self._at and self._request.Test()


@pytest.fixture
def apart(size):
    """Return an exchange of all ranks separate from hvdkit's, so that ranks can leave it; None without MPI."""
    communicator = world._current().communicator
    hk.barrier()
    return None if communicator is None or size == 1 else ObjectExchange(cluster.horovod(), communicator.Dup())


def test_a_rank_that_took_part_may_leave_before_the_others_are_through(apart, rank, size, monkeypatch):
    if apart is None:
        pytest.skip("needs several ranks and MPI")
    assert apart.allgather(rank) == list(range(size))
    if rank == 0:
        assert apart.allgather("last") == ["last"] * size
        apart.close()
    else:
        wait = apart._wait
        monkeypatch.setattr(apart, "_wait", lambda request: wait(LateRequest(request, 0.6)))
        assert apart.allgather("last") == ["last"] * size
    hk.barrier()


def test_a_rank_that_did_not_take_part_ends_the_wait(apart, rank, size):
    if apart is None:
        pytest.skip("needs several ranks and MPI")
    apart.allgather(rank)
    if rank == 0:
        with collective("counted as by the others"):
            apart.close()
    else:
        with pytest.raises(hk.ClusterError, match="rank 0 left the job"):
            apart.allgather("more")
    hk.barrier()
