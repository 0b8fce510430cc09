"""Processes of this host, as /proc shows them. Standard library only: sentinels load nothing else.

Sources: proc(5), prctl(2), Linux's Documentation/scheduler/sched-stats (``schedstat``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from functools import cache
from typing import NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Stat(NamedTuple):
    """What /proc/PID/stat says of a process or a thread.

    Attributes:
        name: of its program, at most 15 characters.
        state: one letter: R, S, D (waits for a disk), T (stopped), t (stopped by a debugger), Z, X.
        parent: PID of its parent.
        seconds: of a core, with those of children that it has waited for.
        started: in clock ticks since the kernel booted; with the PID it identifies a process for good.
    """

    name: str
    state: str
    parent: int
    seconds: float
    started: int


def stat(pid: int, thread: int | None = None) -> Stat | None:
    """Return what the kernel reports about a process or one of its threads; None if it has ended."""
    text = _read(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
    begin, _, rest = text.rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return Stat(begin.partition("(")[2], fields[0], int(fields[1]), seconds, int(fields[19]))


def is_over(pid: int, started: int) -> bool:
    """Return True if the process that began at ``started`` has ended."""
    found = stat(pid)
    if found is not None:
        return found.started != started or found.state in "ZX"
    try:  # or this process may open no more files, or must not see the other one
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


@cache
def place() -> str:
    """Return what processes share that can see and signal each other: host, boot, and container.

    Read once: a host may be given another name while training runs.
    """
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    return "/".join([socket.gethostname(), _read("/proc/sys/kernel/random/boot_id").strip(), space])


def threads(pid: int) -> set[int]:
    """Return the thread IDs of a process; an empty set if it has ended."""
    try:
        return set(map(int, os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208
    except OSError:
        return set()


def cpu_nanoseconds(pid: int, thread: int) -> int | None:
    """Return the nanoseconds that a thread has run, or None if it has ended."""
    if _has("schedstat"):
        fields = _read(f"/proc/{pid}/task/{thread}/schedstat").split()
        return int(fields[0]) if fields else None
    fields = _read(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) * 10**9 // os.sysconf("SC_CLK_TCK") if fields else None


def descendants(pid: int) -> list[int]:
    """Return the PIDs of all children of ``pid``, and of theirs."""
    below = _children if _has("children") else _all_children().get
    found: list[int] = []
    for child in below(pid) or ():
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    return [int(one) for thread in threads(pid) for one in _read(f"/proc/{pid}/task/{thread}/children").split()]


def _all_children() -> dict[int, list[int]]:
    """Return the children of every process that has any."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (one := stat(int(name))) is not None:
            found.setdefault(one.parent, []).append(int(name))
    return found


@cache
def _has(name: str) -> bool:
    """Return True if this kernel was built with a file of that name for each thread."""
    return os.path.exists(f"/proc/thread-self/{name}")  # noqa: PTH110


class Work(NamedTuple):
    """What a process has done since it began: seconds of a core, and bytes read and written."""

    seconds: float
    transferred: int


def work(pid: int) -> Work | None:
    """Return what a process and those of its children that have ended have done; None if it is over."""
    found = stat(pid)
    if found is None:
        return None
    transferred = sum(int(line.split()[1]) for line in _read(f"/proc/{pid}/io").splitlines()[:2])
    return Work(found.seconds, transferred)


def signal_at_parent_end(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        _prctl(_PR_SET_PDEATHSIG, int(number))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes  # a quarter of a megabyte, which a sentinel that starts no program does not need

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process, unless it is over."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def end_descendants(seconds: float = 2.0) -> None:
    """Kill every process below this one, and those that become its children when their parents are gone."""
    until = time.monotonic() + seconds
    while (found := descendants(os.getpid())) and time.monotonic() < until:
        for pid in found:
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
