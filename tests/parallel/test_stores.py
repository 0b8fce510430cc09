"""Checkpoints in an object store: each rank writes and reads its own rows there."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from helpers.object_store import BUCKET, make_impatient, served

import hvdkit as hk


@pytest.fixture(scope="module")
def store():
    """One server for all ranks, which the chief runs."""
    if hk.is_chief():
        with served() as store:
            hk.broadcast_object(store.environment)
            yield store
            hk.barrier()
    else:
        os.environ.update(hk.broadcast_object(None))
        yield None
        hk.barrier()


@pytest.mark.nightly(3)
@pytest.mark.ranks(2, 3)
def test_an_outage_while_ranks_report_costs_no_checkpoint(store, monkeypatch):
    make_impatient(monkeypatch)
    if store:
        until: list[float] = []

        def fault(request):
            if "shard-00001" in request.key and not until:
                until.append(time.monotonic() + 2)
            return "refuse" if until and time.monotonic() < until[0] else None

        store.fault = fault
    path = f"s3://{BUCKET}/outage/step-000000007"
    table = hk.PartitionedVariable((11, 3), name="table", initializer="ones")
    hk.checkpoint.save(path, {"table": table, "rank": np.array(hk.rank())})
    if store:
        assert until
        store.fault = lambda request: None
    hk.barrier()
    assert hk.checkpoint.verify(path).checkpoints == 1


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("gather", [False, True])
def test_sharded_and_replicated_state(store, gather):
    path = f"s3://{BUCKET}/{gather}/step-000000007"
    expected = np.arange(33, dtype="float32").reshape(11, 3)
    for scale in (1, 2):  # the second save replaces the first
        table = hk.PartitionedVariable((11, 3), name="table", initializer="zeros")
        table.assign(expected * scale)
        hk.checkpoint.save(path, {"table": table, "scale": scale, "rank": np.array(hk.rank())}, gather=gather)
    table = hk.PartitionedVariable((11, 3), name="table", initializer="zeros")
    restored = hk.checkpoint.restore(path, {"table": table, "scale": 0}, gather=gather)
    assert restored["scale"] == 2
    np.testing.assert_array_equal(table.gather(), expected * 2)
    if hk.is_chief():
        names = store.names(f"{gather}/step-000000007")
        assert len(names) == 2 + hk.size()
        assert names[0] == "manifest.json"
    assert hk.checkpoint.verify(path).checkpoints == 1
