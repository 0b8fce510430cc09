"""Start jobs that fail, on one host or several, and return how they ended."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from helpers.hosts import Hosts
from helpers.jobs import BIN, environment, words
from helpers.speed import WAIT, slowdown

SCRIPT = Path(__file__).parents[1] / "jobs" / "faulty.py"
PATHS = f"{SCRIPT.parents[2]}{os.pathsep}{SCRIPT.with_name('absent')}"
LAUNCHERS = {
    "mpirun": ["mpirun", "--bind-to", "none"],
    "horovodrun": ["horovodrun"],
    "horovodrun --gloo": ["horovodrun", "--gloo"],
    "hvdkit run": ["hvdkit", "run"],
    "hvdkit run, Gloo": ["hvdkit", "run", "--engine", "gloo"],
}
# The last line of hvdkit in a job's output, after any prefix from the launcher.
HVDKIT_LINE = re.compile(r"^(\[[\d,]+\]<std\w+>: ?)?hvdkit( run)?: ")
_GONE_SECONDS = 5.0


@dataclass(frozen=True)
class Ending:
    """The result of a job.

    Attributes:
        code: the launcher's exit code; None if it did not end in time.
        seconds: seconds from the fault until all processes of the job had ended.
        output: all output.
        last: the last line of hvdkit, without the launcher's prefix.
        left: processes that still ran five seconds, times the machine's slowdown, after the launcher's end.
    """

    code: int | None
    seconds: float
    output: str
    last: str
    left: list[str]


def run(
    fault: str,
    launcher: str,
    *,
    ranks: int = 2,
    at: int = 1,
    hosts: Hosts | None = None,
    act: Callable[[], None] | None = None,
    limit: float = WAIT,
    steps: int = 40,
    **extra: str,
) -> Ending:
    """Run the script with ``fault`` on rank ``at``.

    Args:
        fault: the fault that :mod:`faulty` injects.
        launcher: one of :data:`LAUNCHERS`.
        ranks: number of ranks.
        at: the rank that fails.
        hosts: run one rank on each of these; on this machine if None.
        act: called when the script has reached its fault.
        limit: seconds after which the job is ended.
        steps: number of steps if no rank fails.
        **extra: environment variables.

    Raises:
        NoMemoryGroup: for the fault "out of memory", if a process's memory cannot be limited.
    """
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-fault-"))
    script = shutil.copy(SCRIPT, folder)
    rank = [sys.executable, str(script), fault, str(at), str(steps)]
    group = memory_group() if fault == "out of memory" else None
    if group is not None:
        extra["HVDKIT_TEST_GROUP"] = str(group)
    env = environment(PYTHONPATH=PATHS, TF_CPP_MIN_LOG_LEVEL="2", **extra)
    command = [*LAUNCHERS[launcher], "-np", str(ranks), *(across(launcher, hosts.list, env) if hosts else ()), *rank]
    start = subprocess.Popen if hosts is None else hosts[0].start
    try:
        with (folder / "out").open("wb") as out:
            process = start(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        return watch(process, folder, act, limit)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if group is not None:
            group.rmdir()


def memory_group() -> Path:
    """Create a cgroup with 128 MiB of memory; raise NoMemoryGroup if this user or kernel cannot."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(tempfile.mkdtemp(prefix="hvdkit-", dir=root)) if os.access(root, os.W_OK) else None
        if group is not None and (group / limit).exists():
            (group / limit).write_text(str(2**27))
            return group
        if group is not None:
            group.rmdir()
    raise NoMemoryGroup("no group of processes with a limit of memory can be made here")


class NoMemoryGroup(OSError):
    """Raised if memory cannot be limited on this machine."""


def across(launcher: str, hosts: str, env: Mapping[str, str]) -> list[str]:
    """Return the launcher's arguments for several hosts with their slots."""
    if launcher.startswith("hvdkit run"):
        return ["-H", hosts]
    if launcher != "mpirun":
        prefix = ["--mpi-args", f"--prefix {BIN.parent}"] if launcher == "horovodrun" else []
        return ["-H", hosts, "--network-interface", "eth0", *prefix]
    network = [word for part in ("btl", "oob") for word in ("--mca", f"{part}_tcp_if_include", "eth0")]
    passed = [n for n in env if n in ("PATH", "PYTHONPATH") or n.startswith(("HVDKIT_", "TF_", "OMPI_"))]
    where = ["-H", hosts, "--prefix", str(BIN.parent)]
    return [*where, *network, *(word for name in passed for word in ("-x", name))]


def watch(process: Any, folder: Path, act: Callable[[], None] | None, limit: float) -> Ending:
    """Wait for a job whose processes have ``folder`` on their command lines and write to the file ``out`` in it."""
    started, since = time.time(), None
    while process.poll() is None and time.time() - started < limit:
        time.sleep(0.02)
        if since is None and (found := re.search(r"fault at ([\d.]+)", _read(folder))):
            since = float(found[1])
            if act is not None:
                act()
                since = time.time()
    code, until = process.poll(), time.time() + _GONE_SECONDS * slowdown()
    while (left := _of(folder)) and code is not None and time.time() < until:
        time.sleep(0.02)
    ended = time.time()
    commands = [" ".join(words(member.pid)) for member in left]
    for member in left:
        member.kill()
    process.wait()
    text = without_start(_read(folder))
    if since is None and (found := re.search(r"fault at ([\d.]+)", text)):
        since = float(found[1])
    lines = [re.sub(r"^\[[\d,]+\]<std\w+>: ?", "", line) for line in text.splitlines()]
    last = next((line for line in reversed(lines) if line.startswith(("hvdkit: ", "hvdkit run: "))), "")
    return Ending(code, ended - (since or started), text, last, commands)


def without_start(output: str) -> str:
    """Return the output of a job without the lines of ``hvdkit run`` about its start."""
    return re.sub(r"^hvdkit run: (starting|\d+ s:) .*\n", "", output, flags=re.MULTILINE)


def _read(folder: Path) -> str:
    return (folder / "out").read_text(errors="replace")


def _of(folder: Path) -> list[psutil.Process]:
    """Return the processes with the job's script on their command lines: ranks, launchers, and their shells."""
    return [p for p in psutil.process_iter() if any(str(folder) in word for word in words(p.pid))]
