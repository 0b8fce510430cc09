"""What a launcher promised, read from the environment only; and when a launcher is ended."""

import contextlib
import os
import shutil
import socket
import subprocess
import time

import psutil
import pytest
from helpers.speed import wait_until

from hvdkit.cluster.devices import core_of, thread_count
from hvdkit.cluster.engine import _check_size, start_horovod
from hvdkit.errors import ClusterError
from hvdkit.machine.launcher import ALONE, launched_rank, shell_that_waits
from hvdkit.watchdog.coordinating import CoordinatingSentinel

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
GLOO = {
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "3",
    "HOROVOD_LOCAL_RANK": "2",
    "HOROVOD_LOCAL_SIZE": "3",
    "HOROVOD_CONTROLLER": "gloo",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("environ", "launcher", "place", "controller"),
    [
        (OPEN_MPI, "mpirun (Open MPI)", (5, 8, 1, 4), "mpi"),
        (GLOO, "horovodrun --gloo", (2, 3, 2, 3), "gloo"),
        (MPICH, "mpiexec (MPICH)", (1, 2, 1, 2), "mpi"),
        (SLURM, "srun (Slurm)", (3, 4, 0, 2), "mpi"),
        # srun starts Open MPI's ranks: the innermost launcher decides.
        (SLURM | OPEN_MPI, "mpirun (Open MPI)", (5, 8, 1, 4), "mpi"),
        # horovodrun --gloo inside a Slurm step.
        (SLURM | GLOO, "horovodrun --gloo", (2, 3, 2, 3), "gloo"),
    ],
)
def test_promises(environ, launcher, place, controller):
    promise = launched_rank(environ)
    assert promise.launcher == launcher
    assert (promise.rank, promise.size, promise.local_rank, promise.local_size) == place
    assert promise.controller == controller


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # A batch script that runs python directly, in an allocation of 4 tasks, is one process.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"HOROVOD_RANK": "", "HOROVOD_SIZE": ""},
        {"HOROVOD_RANK": "zero", "HOROVOD_SIZE": "one"},
    ],
)
def test_alone(environ):
    assert launched_rank(environ) is ALONE


def test_a_world_of_another_size_than_promised():
    """This happens if mpirun and Horovod use different MPIs: every process is rank 0 of 1."""
    promise = launched_rank(OPEN_MPI)
    _check_size(8, promise)
    with pytest.raises(ClusterError, match=r"world size: got 1 on rank 5 .*expected 8, as mpirun") as error:
        _check_size(1, promise)
    assert "hvdkit doctor" in str(error.value)


@pytest.mark.parametrize(
    ("cores", "masks", "expected"),
    [
        (4, [{0, 1, 2, 3}] * 2, 2),
        (4, [{0, 1, 2, 3}] * 3, 1),
        (2, [{0, 1}] * 4, 1),
        (8, [set(range(8))], 8),
        # The launcher bound each rank to separate cores, so cores are not divided.
        (2, [{0, 1}, {2, 3}], 2),
        # A container's quota of 2 of 64 cores.
        (2, [set(range(64))] * 2, 1),
    ],
)
def test_thread_count(cores, masks, expected):
    masks = [frozenset(mask) for mask in masks]
    assert thread_count(cores, masks[0], masks) == expected


@pytest.mark.parametrize(
    ("cores", "masks", "expected"),
    [
        (2, [{0, 1}] * 4, [0, 1, 0, 1]),
        (2, [{5, 3}] * 6, [3, 5, 3, 5, 3, 5]),
        # Bound to sockets: the ranks of a socket share its cores, whatever their numbers.
        (2, [{0, 1}, {2, 3}] * 4, [0, 2, 1, 3, 0, 2, 1, 3]),
        # At least as many ranks as cores; an uneven number; one core; a quota; masks that overlap.
        (4, [{0, 1, 2, 3}] * 4, [None] * 4),
        (2, [{0, 1}] * 3, [None] * 3),
        (1, [{0}] * 4, [None] * 4),
        (2, [{0, 1, 2, 3}] * 8, [None] * 8),
        (2, [{0, 1}] * 4 + [{1, 2}] * 4, [None] * 8),
    ],
)
def test_ranks_that_share_every_core_evenly_keep_to_one(cores, masks, expected):
    masks = [frozenset(mask) for mask in masks]
    assert [core_of(n, cores, masks) for n in range(len(masks))] == expected


@pytest.mark.parametrize(
    ("command", "is_ended"),
    [("mpirun 600; true", True), ("mpirun 600 & wait", False), ("true; mpirun 600; true", False)],
)
def test_a_launcher_whose_shell_was_killed_is_ended(tmp_path, command, is_ended):
    """horovodrun becomes ``sh -c "mpirun ..."``. In the background, mpirun may outlive the shell, as with nohup."""
    (tmp_path / "mpirun").symlink_to(shutil.which("sleep"))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(["sh", "-c", command], env={**os.environ, "PATH": path}) as shell:
        wait_until(lambda: [one for one in psutil.Process(shell.pid).children() if one.name() == "mpirun"])
        (launcher,) = psutil.Process(shell.pid).children()
        try:
            ours, theirs = socket.socketpair()
            sentinel = CoordinatingSentinel(os.getpid(), 0, ours, [])
            sentinel._launcher, sentinel._shell = launcher.pid, shell_that_waits(launcher.pid)
            sentinel._end_orphan()
            assert launcher.is_running()
            shell.kill()
            shell.wait()
            sentinel._end_orphan()
            if is_ended:
                wait_until(lambda: not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE)
            else:
                time.sleep(0.3)
                assert launcher.is_running()
            theirs.close()
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                launcher.kill()


def test_a_program_that_a_rank_has_started_is_no_rank(monkeypatch):
    """tests/parallel/test_cluster.py proves that MPI_Init sets the variable for child processes."""
    monkeypatch.setenv("OMPI_MCA_ess", "pmi")
    for environ in (OPEN_MPI, OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}):
        with pytest.raises(ClusterError, match=r"rank \d of \d, which has started this process.*hvdkit run -np 1"):
            start_horovod(launched_rank(environ))
