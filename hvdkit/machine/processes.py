"""Processes of this host by number and start time: a number alone may have come to name another process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hvdkit.machine.host import boot_id

_LOOK_SECONDS = 0.5
_MPIRUNS = ("mpirun", "orterun", "mpiexec")
_FORCE_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
_FILES = 512


class Identity(NamedTuple):
    """One process among all hosts: two that share ``place`` see each other's numbers.

    ``started`` is in the kernel's clock since it booted: whoever sets the time of day does not change it.
    """

    place: str
    pid: int
    started: float


def own_identity() -> Identity:
    """Return this process's identity."""
    return Identity(_place(), os.getpid(), _started(os.getpid()))


def _started(pid: int) -> float:
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return psutil.Process(pid).create_time()  # not Linux, or it is over


@cache
def _place() -> str:
    """Return what processes share that can see and signal each other: host, boot, and container.

    Once: a host may be given another name while training runs.
    """
    parts = [socket.gethostname(), boot_id() or ""]
    with contextlib.suppress(OSError):  # not Linux: the host's name has to do
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return "/".join(parts)


def allow_files(number: int) -> None:
    """Let this process open ``number`` files and those that it opens anyway; 1,024 is a common limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )


def wake_with_parent_gone() -> None:
    """Have a stopped process go on when its launcher ends: then it hears that the job is over, and ends too."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def end_stuck_mpirun() -> None:
    """Tell an Open MPI mpirun above this process to end now: it would wait for a host that is cut off, for hours.

    It tells its daemons to end their ranks at the first signal, and ends itself at a second one soon after.
    """
    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process().parent()
        if launcher is not None and launcher.name().startswith(_MPIRUNS):
            launcher.terminate()
            time.sleep(_FORCE_SECONDS)
            launcher.terminate()


def end_stuck_step() -> None:
    """Have Slurm end the step that this process is a task of: srun would wait for a task that is stopped elsewhere."""
    with contextlib.suppress(psutil.Error, OSError):
        daemon = psutil.Process().parent()
        if daemon is not None and daemon.name().startswith("slurmstepd"):
            step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
            with Path(os.devnull).open("r+b") as nothing:
                subprocess.Popen(["scancel", "--signal=KILL", step], stdin=nothing, stdout=nothing, stderr=nothing)


def find(identity: Any) -> psutil.Process | None:
    """Return the process, or None where it is over, or of another host."""
    place, pid, started = identity
    if place != _place():
        return None
    try:
        return psutil.Process(pid) if _started(pid) == started else None
    except psutil.Error:
        return None


def condition(identity: Any) -> str:
    """Look at a process for half a second: ``"gone"``, ``"stopped"``, ``"busy"`` or ``"idle"``.

    A process that computes while one of its threads cannot answer is busy: something holds Python's lock. So is one
    that waits for a disk or for pages that were swapped out, and one that a debugger has stopped.
    """
    process = find(identity)
    if process is None:
        return "gone"
    try:
        before = sum(process.cpu_times()[:2])
        time.sleep(_LOOK_SECONDS)
        status, after = process.status(), sum(process.cpu_times()[:2])
    except psutil.Error:
        return "gone"
    if status == psutil.STATUS_STOPPED:
        return "stopped"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    is_held = status == psutil.STATUS_TRACING_STOP or any(map(waits_for_disk, threads(process.pid)))
    return "busy" if after > before or is_held else "idle"


def threads(pid: int | None = None) -> set[int]:
    """Return the kernel's numbers of a process's threads, of this one by default; none where they cannot be known."""
    try:
        return {int(task.name) for task in Path(f"/proc/{pid or os.getpid()}/task").iterdir()}
    except OSError:
        return set()


def descendants(pid: int) -> list[int]:
    """Return the process ids of all children of ``pid``, and theirs; an empty list if they are not known."""
    found: list[int] = []
    for thread in threads(pid):
        with contextlib.suppress(OSError):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                found += [child, *descendants(child)]
    return found


class Work(NamedTuple):
    """What a process has done since it began: seconds of a core, and bytes read and written."""

    seconds: float
    transferred: int


def work(pid: int) -> Work | None:
    """Return what a process and those of its children that have ended have done; None if it is over."""
    try:
        # Fields 14 to 17 of proc(5): user and system time, and those of the children that were waited for.
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return None
    transferred = 0
    with contextlib.suppress(OSError):  # a program of another user
        transferred = sum(int(line.split()[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines()[:2])
    return Work(sum(map(int, times)) / os.sysconf("SC_CLK_TCK"), transferred)


def waits_for_disk(thread: int) -> bool:
    """Return True where a thread is in uninterruptible sleep."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    return False


def kill(identity: Any) -> None:
    """End a process of this host at once; a stopped one, too. One that is over is left alone."""
    process = find(identity)
    if process is not None:
        with contextlib.suppress(psutil.Error):
            process.kill()
