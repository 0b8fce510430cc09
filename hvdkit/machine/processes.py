"""Processes of this host, from /proc. Uses only the standard library, because sentinels import nothing else.

Sources: proc(5), prctl(2), Linux's Documentation/scheduler/sched-stats (``schedstat``).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from functools import cache
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OTHER_FILES = 512  # besides those that allow_files is asked for


class Stat(NamedTuple):
    """State of a process or thread from /proc/PID/stat.

    Attributes:
        name: name of its program, up to 15 characters.
        state: one letter: R, S, D (waits for a disk), T (stopped), t (stopped by a debugger), Z, X.
        parent: PID of its parent.
        seconds: CPU time, including that of children it has waited for.
        started: start time in clock ticks since boot. Together with the PID it uniquely identifies a process.
        resident: pages of memory.
    """

    name: str
    state: str
    parent: int
    seconds: float
    started: int
    resident: int


def stat(pid: int, thread: int | None = None) -> Stat | None:
    """Return the state of a process or one of its threads, or None after its end."""
    text = _read(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    if len(fields) < 22:
        return None
    seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return Stat(head.partition("(")[2], fields[0], int(fields[1]), seconds, int(fields[19]), int(fields[21]))


def is_over(pid: int, started: int) -> bool:
    """Return True if process ``pid`` with start time ``started`` has ended."""
    process = stat(pid)
    if process is not None:
        return process.started != started or process.state in "ZX"
    try:  # the file may be unreadable: too many open files, or hidden from this process
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; empty after its end."""
    return _read(f"/proc/{pid}/cmdline").split("\0")[:-1]


def boot_id() -> str | None:
    """Return the ID of this boot of the machine, which is equal in all its containers; None if not on Linux."""
    return _read("/proc/sys/kernel/random/boot_id").strip() or None


@cache
def place() -> str:
    """Return an ID that is equal for processes that can see and signal each other: host, boot, and container.

    Cached, because a host's name may change while training runs.
    """
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    return "/".join([socket.gethostname(), boot_id() or "", namespace])


def threads(pid: int) -> set[int]:
    """Return the thread IDs of a process; empty after its end."""
    try:
        return set(map(int, os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208
    except OSError:
        return set()


def cpu_nanoseconds(pid: int, thread: int) -> int | None:
    """Return the CPU time of a thread in nanoseconds, or None after its end."""
    if _has_thread_file("schedstat"):
        fields = _read(f"/proc/{pid}/task/{thread}/schedstat").split()
        return int(fields[0]) if fields else None
    fields = _read(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) * 10**9 // os.sysconf("SC_CLK_TCK") if fields else None


def waited_seconds(pid: int) -> float:
    """Return the seconds for which the main thread of a process could run and had no core; 0 if unknown."""
    fields = _read(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def descendants(pid: int) -> list[int]:
    """Return the PIDs of all descendants of ``pid``."""
    children_of = _children if _has_thread_file("children") else _children_by_parent().get
    found: list[int] = []
    for child in children_of(pid) or ():
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    return [int(child) for thread in threads(pid) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def _children_by_parent() -> dict[int, list[int]]:
    """Return the children of all processes, by the parent's PID."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (process := stat(int(name))) is not None:
            children.setdefault(process.parent, []).append(int(name))
    return children


@cache
def _has_thread_file(name: str) -> bool:
    """Return True if this kernel provides a file of that name for each thread."""
    return os.path.exists(f"/proc/thread-self/{name}")  # noqa: PTH110


class Work(NamedTuple):
    """Work of a process since its start: CPU seconds, and bytes read and written."""

    seconds: float
    transferred: int


def work(pid: int) -> Work | None:
    """Return the work of a process and of its children that have ended, or None after its end."""
    process = stat(pid)
    if process is None:
        return None
    transferred = sum(int(line.split()[1]) for line in _read(f"/proc/{pid}/io").splitlines()[:2])
    return Work(process.seconds, transferred)


def signal_at_parent_end(number: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when its parent ends for any reason."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        _prctl(_PR_SET_PDEATHSIG, int(number))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes  # costs a quarter of a megabyte, which watching sentinels do not need

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process, unless it has ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def end_descendants(seconds: float = 2.0) -> None:
    """Kill all descendants of this process, including those that it adopts while their parents end."""
    deadline = time.monotonic() + seconds
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            kill(pid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.readall().decode(errors="replace")
    except OSError:
        return ""


def allow_files(number: int) -> None:
    """Raise this process's limit of open files, often 1,024, to allow ``number`` files and some others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = number + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        with contextlib.suppress(ValueError, OSError):
            limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
