"""The launcher of this process: the rank that it assigned, read from the environment, and how to end it.

Needs neither MPI nor TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hvdkit.machine import processes

_SECOND_SIGTERM_SECONDS = 0.5
_MPIRUN_NAMES = ("mpirun", "orterun", "mpiexec")


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """The rank that a launcher assigned to this process.

    Attributes:
        launcher: the launcher's name, for messages.
        rank: rank of this process.
        size: number of ranks.
        local_rank: rank of this process among the ranks of this host.
        local_size: number of ranks on this host. srun sets it only with an explicit number of tasks per node.
        controller: the controller that Horovod must use: ``"mpi"`` or ``"gloo"``.
        hosts: number of hosts, or None if the launcher does not set it.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    controller: str
    hosts: int | None = None

    @property
    def on_several_hosts(self) -> bool:
        """True if there are ranks on other hosts."""
        return self.size > self.local_size if self.hosts is None else self.hosts > 1


ALONE = LaunchedRank(launcher="none", rank=0, size=1, local_rank=0, local_size=1, controller="gloo")

# The launchers, and their variables for rank, size, local rank and local size. The first one with both rank and size
# set started this process: horovodrun --gloo starts processes itself, and srun may have started mpirun.
_LAUNCHERS = (
    ("horovodrun --gloo", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    (
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpiexec (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # SLURM_STEP_NUM_TASKS is set only inside a step: a batch script that calls python is one process.
    ("srun (Slurm)", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def launched_rank(environ: Mapping[str, str] | None = None) -> LaunchedRank:
    """Return the rank that the launcher assigned, or :data:`ALONE` without a launcher.

    Example:
        >>> launched_rank({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}).size
        4
    """
    env = os.environ if environ is None else environ
    for name, rank, size, local_rank, local_size in _LAUNCHERS:
        if env.get(rank, "").isdigit() and env.get(size, "").isdigit():
            return LaunchedRank(
                launcher=name,
                rank=int(env[rank]),
                size=int(env[size]),
                local_rank=_number(env.get(local_rank), 0),
                local_size=_number(env.get(local_size), 1),
                controller="gloo" if name.endswith("--gloo") else "mpi",
                hosts=_number(env.get("SLURM_STEP_NUM_NODES"), 1) if name.startswith("srun") else None,
            )
    return ALONE


def launcher_tags_lines(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if the launcher tags lines with the rank: ``horovodrun --gloo``, and ``mpirun --tag-output``.

    Example:
        >>> launcher_tags_lines({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
        False
    """
    env = os.environ if environ is None else environ
    return launched_rank(env).launcher == "horovodrun --gloo" or env.get("OMPI_MCA_orte_tag_output") == "1"


def shell_that_waits(launcher: int) -> tuple[int, int] | None:
    """Return PID and start time of the shell that runs nothing but launcher ``launcher``; or None.

    horovodrun becomes such a shell. If it is killed, nothing else ends the launcher. A launcher in the background
    may outlive its shell.
    """
    process = processes.stat(launcher)
    if process is None or not process.name.startswith(_MPIRUN_NAMES):
        return None
    words = processes.command_line(process.parent)
    is_shell = len(words) == 3 and words[0].endswith("sh") and words[1] == "-c"
    if not is_shell or not words[2].startswith(_MPIRUN_NAMES) or "&" in words[2]:
        return None
    shell = processes.stat(process.parent)
    return None if shell is None else (process.parent, shell.started)


def end_stuck_launcher(pid: int, *, ranks_run: bool) -> bool:
    """End launcher ``pid``, which may otherwise wait for hours for an unreachable host or a stopped rank.

    Open MPI's mpirun exits with 1 if a second SIGTERM follows soon after the first. But SIGTERM crashes it (4.1.8: in
    PMIx's finalize) after it has noticed the end of a rank, so it is ended before the ranks. With Slurm, the step is
    canceled after the ranks have ended, because srun would wait for a task that is stopped on another host.

    Args:
        pid: the launcher.
        ranks_run: True if the ranks of this host have not been ended yet.

    Returns:
        False if this launcher must be ended after the ranks: call this function again then.
    """
    launcher = processes.stat(pid)
    if launcher is None:
        return True
    if launcher.name.startswith(_MPIRUN_NAMES) and ranks_run:
        processes.kill(pid, signal.SIGTERM)
        time.sleep(_SECOND_SIGTERM_SECONDS)
        processes.kill(pid, signal.SIGTERM)
    elif ranks_run:
        return False
    elif launcher.name.startswith(_MPIRUN_NAMES):
        processes.kill(pid, signal.SIGKILL)
    elif launcher.name.startswith("slurmstepd"):
        step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
        to_null = [(os.POSIX_SPAWN_OPEN, file, os.devnull, os.O_RDWR, 0) for file in range(3)]
        with contextlib.suppress(OSError):  # importing subprocess would cost every sentinel a megabyte
            os.posix_spawnp("scancel", ["scancel", "--signal=KILL", step], os.environ, file_actions=to_null)
    return True


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdigit() else default
