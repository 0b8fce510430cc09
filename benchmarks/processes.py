"""Start the processes of one run, wait for them, and leave none behind, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
WORKERS = HERE / "workers"
BIN = Path(sys.executable).parent
UNAVAILABLE = "not available: "  # what a worker's last words begin with where its way cannot be had
_TAG = re.compile(r"\n?\[\d+,\d+\]<std\w+>:")  # Open MPI's, before each piece of what a rank writes
_MARK = "HVDKIT_BENCH_RUN"
_PLACE = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "HVDKIT_", "TF_CONFIG")


class RunFailed(Exception):
    """A way's run failed. ``tail`` holds the end of its output."""

    def __init__(self, reason: str, tail: str = "") -> None:
        super().__init__(reason)
        self.tail = tail


class Unavailable(Exception):
    """A way cannot be run on this machine; the message says why."""


def environment(*, threads: int | None = 1, **extra: str) -> dict[str, str]:
    """Return the environment for a run's processes: no place in a world, plain settings, ``threads`` to compute with.

    Args:
        threads: compute threads of a process; None: its own choice.
        extra: further variables.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(_PLACE)}
    env |= {
        "PATH": f"{BIN}{os.pathsep}{env['PATH']}",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    if threads is not None:
        env |= {name: str(threads) for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")}
    return env | extra


def ranks(size: int, worker: Sequence[str]) -> list[str]:
    """Return the command of ``size`` ranks of hvdkit, as its users start them."""
    return [str(BIN / "hvdkit"), "run", "-np", str(size), "--", *worker]


def launch(commands: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None, timeout: float = 300.0) -> str:
    """Run commands at once until all of them have ended well; return what they printed.

    Args:
        commands: one process each.
        env: their environment; by default :func:`environment`'s.
        timeout: seconds.

    Raises:
        RunFailed: One of them failed or took longer.
        Unavailable: One of them said so.
    """
    mark = uuid.uuid4().hex
    env = {**(env if env is not None else environment()), _MARK: mark}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        started: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                # In a session of its own: Ctrl-C is this process's, which ends them in order.
                started.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
            trouble = _wait(started, timeout)
        finally:
            end(mark)
            for process in started:
                process.wait()
        output.seek(0)
        text = _TAG.sub("\n", output.read())
    if trouble is None:
        return text
    lines = [line for line in text.splitlines() if line.strip()]
    if absent := next((line for line in reversed(lines) if UNAVAILABLE in line), None):
        raise Unavailable(absent.partition(UNAVAILABLE)[2].strip())
    tail = "\n".join([f"$ {shlex.join(map(str, commands[0]))}", *lines[-40:]])
    raise RunFailed(f"{trouble}: {_cause(lines)}" if lines else trouble, tail)


def _wait(started: Sequence[subprocess.Popen[Any]], timeout: float) -> str | None:
    """Wait until all have ended well, or return what went wrong."""
    until = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in started]
        if bad := next((code for code in codes if code), None):
            return f"exit code {bad}" if bad > 0 else f"ended by {signal.Signals(-bad).name}"
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > until:
            return f"not done after {timeout:.0f} s"
        time.sleep(0.05)


def _cause(lines: Sequence[str]) -> str:
    """Return the line that most likely says what went wrong: the last that names an error and says more, else any."""
    named = [line for line in lines if re.search(r"(error|exception|abort\w*|what\(\)): *\S", line, re.IGNORECASE)]
    return " ".join((named or list(lines))[-1].split())[:200]


def end(mark: str) -> None:
    """End every process of a run, wherever it stands: launchers may leave theirs to nobody."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop this half way
    try:
        patience, act = time.monotonic() + 5.0, psutil.Process.terminate
        signalled: set[psutil.Process] = set()
        while left := set(_of(mark)):
            if time.monotonic() > patience:
                signalled, act = set(), psutil.Process.kill
            for process in left - signalled:
                with contextlib.suppress(psutil.NoSuchProcess):
                    act(process)
            signalled |= left
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, handler)


def _of(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark:
                yield process


def rank_processes(parent: int, script: Path) -> list[psutil.Process]:
    """Return the processes below a launcher that run ``script``, in rank order."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(Path(word) == script for word in process.cmdline()):
                found.append((int(process.environ()["OMPI_COMM_WORLD_RANK"]), process))
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def results(folder: Path) -> list[dict[str, float]]:
    """Return what each process left in ``folder``, by number.

    Raises:
        RunFailed: None did.
    """
    files = sorted(folder.glob("result-*.json"), key=lambda file: int(file.stem.rpartition("-")[2]))
    if not files:
        raise RunFailed("no process left a result")
    return [json.loads(file.read_text()) for file in files]
