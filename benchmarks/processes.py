"""Start the processes of one run, wait for them, and end all of them in any case."""

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
UNAVAILABLE = "not available: "  # prefix of a worker's last line if its variant is unavailable
_TAG = re.compile(r"\n?\[\d+,\d+\]<std\w+>:")  # Open MPI's tag before each piece of a rank's output
_RUN_ID = "BENCHMARK_RUN_ID"
_PLACE = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "HVDKIT_", "TF_CONFIG")


class RunFailed(Exception):
    """A variant's run failed. ``tail`` is the end of its output."""

    def __init__(self, reason: str, tail: str = "") -> None:
        super().__init__(reason)
        self.tail = tail


class Unavailable(Exception):
    """A variant cannot be run on this machine; the message is the reason."""


def environment(*, threads: int | None = 1, **extra: str) -> dict[str, str]:
    """Return the environment for a run's processes: no rank variables, default settings, ``threads`` compute threads.

    Args:
        threads: compute threads of a process; None: the framework's default.
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


def worker(script: str, *words: object) -> list[str]:
    """Return the command of a script in workers/."""
    return [sys.executable, str(WORKERS / script), *map(str, words)]


def ranks(size: int, program: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the command of ``size`` ranks of hvdkit, as users start them, with options of ``hvdkit run``."""
    return [str(BIN / "hvdkit"), "run", "-np", str(size), *options, "--", *program]


def horovodrun(size: int, program: Sequence[str]) -> list[str]:
    """Return the command of ``size`` ranks of raw Horovod."""
    return [str(BIN / "horovodrun"), "-np", str(size), *program]


def launch(commands: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None, timeout: float = 300.0) -> str:
    """Run commands in parallel until all have exited with 0; return their output.

    Args:
        commands: one process each.
        env: their environment; by default :func:`environment`'s.
        timeout: seconds.

    Raises:
        RunFailed: A command failed or took longer.
        Unavailable: A command reported that it cannot run here.
    """
    run_id = uuid.uuid4().hex
    env = {**(env if env is not None else environment()), _RUN_ID: run_id}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        started: list[subprocess.Popen[bytes]] = []
        try:
            # In new sessions: only this process gets Ctrl-C, and then ends the others.
            settings: dict[str, Any] = {"env": env, "start_new_session": True}
            settings |= {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            for command in commands:
                started.append(subprocess.Popen(command, **settings))
            trouble = _wait(started, timeout)
        finally:
            end(run_id, started)
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
    """Wait until all have exited with 0, or return what went wrong."""
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
    """Return the most likely error line: the last that names an error with a message, or else the last line."""
    named = [line for line in lines if re.search(r"(error|exception|abort\w*|what\(\)): *\S", line, re.IGNORECASE)]
    return " ".join((named or list(lines))[-1].split())[:200]


def end(run_id: str, started: Sequence[subprocess.Popen[Any]]) -> None:
    """End every process of a run, including those that launchers have orphaned.

    Args:
        run_id: the run's mark in the environment of its processes.
        started: the processes that were started directly. One that has not begun its program has no environment yet.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt this
    until = time.monotonic() + 5.0
    try:
        while left := [*_of(run_id)] or [psutil.Process(each.pid) for each in started if each.poll() is None]:
            patience = until - time.monotonic()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate() if patience > 0 else process.kill()
            psutil.wait_procs(left, timeout=max(0.1, patience))
    finally:
        signal.signal(signal.SIGINT, handler)


def _of(run_id: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_RUN_ID) == run_id:
                yield process


def free_ports(count: int) -> list[int]:
    """Return unused ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def results(folder: Path) -> list[dict[str, float]]:
    """Return the result of each process in ``folder``, by number.

    Raises:
        RunFailed: The folder has no result.
    """
    files = sorted(folder.glob("result-*.json"), key=lambda file: int(file.stem.rpartition("-")[2]))
    if not files:
        raise RunFailed("no process wrote a result")
    return [json.loads(file.read_text()) for file in files]


def slowest(folder: Path) -> dict[str, float]:
    """Return the maximum of every figure over the processes that have it."""
    found = results(folder)
    return {key: max(each[key] for each in found if key in each) for one in found for key in one}
