"""The world of ranks: rank and size, starting, shutting down and starting again."""

import importlib
import logging
import os
import socket
import subprocess
import sys

import numpy as np
import psutil
import pytest
import tensorflow as tf
from helpers.pairwise import printed
from helpers.speed import WAIT, wait_until

import hvdkit as hk
from hvdkit import cluster
from hvdkit.cluster.progress import progress
from hvdkit.machine import launcher
from hvdkit.machine.cores import available_cores

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.core]


def test_every_rank_knows_its_place(rank, size):
    cluster = hk.init()
    promise = launcher.launched_rank()
    assert (cluster.rank, cluster.size) == (promise.rank, promise.size) == (rank, size)
    assert (hk.rank(), hk.size(), hk.is_chief()) == (rank, size, rank == 0)
    assert (hk.local_rank(), hk.local_size()) == (promise.local_rank, promise.local_size) == (rank, size)
    assert cluster.hosts == (socket.gethostname(),) * size
    assert dict(cluster.mesh) == {"data": size}
    assert sorted(hk.allgather_object((hk.rank(), os.getpid()))) == hk.allgather_object((hk.rank(), os.getpid()))
    assert len({pid for _, pid in hk.allgather_object((rank, os.getpid()))}) == size


def test_init_again_returns_the_same_cluster(size):
    assert hk.init() is hk.init() is hk.init(mesh={"data": size})


def test_another_mesh_is_refused_while_running(size):
    with pytest.raises(hk.ClusterError, match=r"mesh.*hk.shutdown"):
        hk.init(mesh={"model": size})


GLOO = launcher.launched_rank().controller == "gloo" and hk.size() > 1


@pytest.fixture
def begun_again():
    """Leave a running cluster after the test."""
    if GLOO:
        pytest.skip("tests/jobs/test_failures.py: under Gloo a second hk.init() is refused")
    yield
    hk.shutdown()
    hk.init()


def test_shutdown_and_init_again(begun_again, rank, size):
    step = tf.function(lambda x: hk.allreduce(x, hk.Sum))
    for number in range(3):
        mesh = {"data": 1, "model": size} if number else None
        cluster = hk.init(mesh=mesh)
        assert dict(cluster.mesh) == (mesh or {"data": size})
        assert hk.allreduce(rank, hk.Sum) == sum(range(size))
        assert (hk.allreduce(np.ones(20_000), hk.Sum) == size).all()
        assert float(step(tf.constant(1.0))) == size
        hk.shutdown()
        hk.shutdown()
        with pytest.raises(hk.ClusterError, match=r"hk.init\(\)"):
            hk.rank()
        with pytest.raises(hk.ClusterError, match=r"hk.init\(\)"):
            hk.allreduce(1.0)


def test_a_mesh_that_does_not_fit(begun_again, rank, size):
    hk.shutdown()
    for mesh in printed([{}, {"data": 0}, {"data": 5}, {"data": 2, "model": 7}, {"data": 1.0}, {"data": -1}]):
        with pytest.raises(ValueError, match=f"mesh: got .*{size}"):
            hk.init(mesh=mesh)
    assert hk.init(mesh={"data": size}).rank == rank


def test_meshes_that_differ_or_fail_on_one_rank_only(begun_again, rank, size):
    for wrong, kind in (({"model": size}, hk.ClusterError), ({"data": size + 1}, ValueError)):
        hk.shutdown()
        odd = rank == size - 1
        if size == 1 and kind is hk.ClusterError:
            continue
        with pytest.raises(kind if odd else hk.ClusterError, match="mesh"):
            hk.init(mesh=wrong if odd else {"data": size})
        assert hk.allgather_object(hk.init().rank) == list(range(size))


def sentinels():
    """Return the PIDs of the sentinels that watch this process."""
    every = psutil.process_iter(["cmdline"])
    return [one.pid for one in every if (one.info["cmdline"] or [])[3:5] == ["watch", str(os.getpid())]]


def test_worlds_that_end_or_do_not_begin_leave_no_sentinel(begun_again, size):
    hk.shutdown()
    wait_until(lambda: not sentinels())
    with pytest.raises(ValueError, match="mesh"):
        hk.init(mesh={"data": size + 1})
    hk.init()
    wait_until(lambda: len(sentinels()) == (size > 1))  # a starting sentinel is two processes for a moment
    hk.shutdown()
    wait_until(lambda: not sentinels())


def test_worlds_that_begin_again_number_their_collectives_alike(begun_again, rank):
    if rank == 0:
        progress().end(progress().begin("one that the other ranks did not come to", None, 0))
    hk.shutdown()
    hk.init()
    hk.barrier()
    assert len(set(hk.allgather_object(progress().key))) == 1


def test_buckets_that_differ_or_are_no_number(begun_again, rank, size, monkeypatch):
    for value, kind in (("400", hk.ClusterError), ("8 MB", ValueError)):
        hk.shutdown()
        odd = rank == size - 1 and (size > 1 or kind is ValueError)
        if not odd and size == 1:
            continue
        with monkeypatch.context() as patched, pytest.raises(kind if odd else hk.ClusterError, match="BUCKET_BYTES"):
            if odd:
                patched.setenv("HVDKIT_BUCKET_BYTES", value)
            hk.init()
        assert hk.allgather_object(hk.init().rank) == list(range(size))


def test_cores_are_shared_out(size):
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    if any(os.environ.get(name) for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")):
        assert threads == 0
    else:
        assert threads == max(1, available_cores() // size)


def test_every_core_has_as_many_ranks(size):
    launched = len(os.sched_getaffinity(os.getppid()))
    kept = hk.allgather_object(sorted(os.sched_getaffinity(0)))
    if 1 < launched < size and size % launched == 0:
        assert all(len(cores) == 1 for cores in kept)
        assert {kept.count(cores) for cores in kept} == {size // launched}


def test_log_lines_are_whole_and_tagged(capfd, rank, size):
    log = logging.getLogger("hvdkit")
    log.warning("two\nlines of %d", rank)
    log.info("for the chief")
    tag = f"[rank {rank}] " if size > 1 and not launcher.launcher_tags_lines() else ""
    chief = f"{tag}for the chief\n" if rank == 0 else ""
    assert capfd.readouterr().err == f"{tag}two\nlines of {rank}\n{chief}"


def test_objects_of_any_length_travel_in_several_collectives(rank, size, monkeypatch):
    """One collective carries at most 2^31 - 1 bytes, a limit that many ranks reach with a few MB each."""
    for largest in printed([64, 1000]):
        monkeypatch.setattr(importlib.import_module("hvdkit.cluster.exchange"), "MAX_BYTES", largest)
        lengths = [0, 5000, 17, 700][:size]
        mine = bytes([rank]) * lengths[rank]
        assert hk.allgather_object(mine) == [bytes([r]) * n for r, n in enumerate(lengths)]
        for root in range(size):
            assert hk.broadcast_object(mine if rank == root else None, root=root) == bytes([root]) * lengths[root]
        empty = cluster.exchange().allgather_bytes(b"")
        assert empty == [b""] * size


def test_a_size_that_repeats_travels_in_one_collective(rank, size, monkeypatch):
    exchange = cluster.exchange()
    if size == 1 or not exchange.over_mpi:
        pytest.skip("no collectives of MPI")
    waits = []
    wait = exchange._wait
    monkeypatch.setattr(exchange, "_wait", lambda request: waits.append(1) or wait(request))
    counts = []
    for length in (0, 5000, 5000 - 100 * rank, 16_000, 16_000, 10, 10):
        waits.clear()
        assert exchange.allgather_bytes(bytes([rank]) * length)[rank] == bytes([rank]) * length
        counts.append(len(waits))
    assert counts == [1, 2, 1, 2, 1, 1, 1]


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_rank_may_start_another_job():
    """E.g. an evaluation, or a test suite under mpirun. MPI_Init has changed this process's environment."""
    code = "import os; print('size', os.environ['OMPI_COMM_WORLD_SIZE'])"
    run = [sys.executable, "-m", "hvdkit", "run", "-np", "3", "--engine", "mpirun"]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": WAIT}
    done = subprocess.run([*run, "--", sys.executable, "-c", code], **options)
    assert sorted(done.stdout.splitlines()) == [f"[rank {other}] size 3" for other in range(3)], done.stderr
    assert done.returncode == 0
    if launcher.launched_rank().launcher == "mpirun (Open MPI)":  # the mark by which hk.init in a child recognizes it
        shown = subprocess.run([sys.executable, "-c", "import os; print(os.environ['OMPI_MCA_ess'])"], **options)
        assert shown.stdout == "pmi\n"
